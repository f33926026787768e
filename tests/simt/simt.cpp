// The scheduler behind simt.h: fibres, meetings, shared memory, the device's limits, and the host calls that adapters
// make. One thread of the process runs one block at a time.
#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

// Saves the callee-saved registers and the stack pointer in *from, and continues where `to` was saved.
extern "C" void simt_switch(void** from, void* to);
asm(R"(
.text
.type simt_switch, @function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size simt_switch, .-simt_switch
)");

namespace simt {
namespace {

constexpr size_t kStack = 256 << 10, kGuard = 4096;

struct Arch {
    int shared_per_block, shared_per_multiprocessor;
};
// CUDA C++ Programming Guide, technical specifications per compute capability: bytes a block can opt in to, and all.
const std::map<int, Arch> kArchs = {{75, {65536, 65536}},   {80, {166912, 167936}}, {86, {101376, 102400}},
                                    {89, {101376, 102400}}, {90, {232448, 233472}}, {100, {232448, 233472}},
                                    {120, {101376, 102400}}};
constexpr int kMultiprocessors = 4;

int environment(const char* name, int otherwise) {
    const char* text = std::getenv(name);
    return text ? std::atoi(text) : otherwise;
}
int arch() { return environment("FASTBERT_SIMT_ARCH", 80); }

struct Copy {
    void* target;
    const void* source;
    int bytes;
    bool valid;
};

struct Fibre {
    enum State { ready, waiting, exited };

    char* stack = nullptr;
    void* sp = nullptr;  // null: to be started
    State state = ready;
    uint3 index{};
    Meeting meeting{};
    std::vector<Copy> copies;    // by cp_async, under way
    std::vector<size_t> groups;  // where each committed group of them ends
    void* fake_stack = nullptr;
};

struct Block {
    std::vector<Fibre> fibres = std::vector<Fibre>(1024);
    size_t threads = 0, exited = 0;
    std::vector<unsigned> ready;       // fibres that can go on
    std::vector<unsigned> warp_waits;  // lanes of each warp that wait for others of the warp
    unsigned block_waits = 0;
    struct Memory {
        const void* site;  // null: dynamic
        char* data;
        size_t bytes;
    };
    std::vector<Memory> memory;
    const std::function<void()>* kernel = nullptr;
    const char* name = "";
    size_t dynamic_bytes = 0;
    unsigned current = 0;
    void* main_sp = nullptr;
    void* main_fake_stack = nullptr;
    const void* main_stack = nullptr;  // as the sanitizer sees it, when main has just been left
    size_t main_stack_bytes = 0;
    bool from_main = false;
    std::string error;
    std::minstd_rand random{static_cast<unsigned>(environment("FASTBERT_SIMT_SEED", 1))};
};
Block* block;  // its fibres live as long as the process

// On arrival on a stack: tells the sanitizer, and learns from it where the main stack is.
void arrive(void* fake_stack) {
#if defined(__SANITIZE_ADDRESS__)
    const void* left = nullptr;
    size_t bytes = 0;
    __sanitizer_finish_switch_fiber(fake_stack, &left, &bytes);
    if (block->from_main) {
        block->main_stack = left;
        block->main_stack_bytes = bytes;
    }
#endif
    block->from_main = false;
}

void switch_stacks(void** from_sp, void** from_fake_stack, void* to_sp, const void* to_stack, size_t to_bytes) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(from_fake_stack, to_stack, to_bytes);
#endif
    simt_switch(from_sp, to_sp);
    arrive(*from_fake_stack);
}

void fibre_main();

void start(Fibre& fibre) {
    if (!fibre.stack) {
        void* memory = mmap(nullptr, kGuard + kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED || mprotect(memory, kGuard, PROT_NONE)) throw std::bad_alloc();
        fibre.stack = static_cast<char*>(memory) + kGuard;
    }
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(fibre.stack, kStack);  // an abandoned fibre left its frames
#endif
    void** top = reinterpret_cast<void**>(fibre.stack + kStack) - 2;
    *top = reinterpret_cast<void*>(&fibre_main);  // returned to by simt_switch, behind six registers
    fibre.sp = top - 6;
}

void go_to(unsigned next, void** from_sp, void** from_fake_stack) {
    Fibre& fibre = block->fibres[next];
    block->current = next;
    threadIdx = fibre.index;
    if (!fibre.sp) start(fibre);
    switch_stacks(from_sp, from_fake_stack, fibre.sp, fibre.stack, kStack);
}

unsigned draw() {
    auto& ready = block->ready;
    std::swap(ready[block->random() % ready.size()], ready.back());
    const unsigned next = ready.back();
    ready.pop_back();
    return next;
}

// Who waits where, for a block that cannot go on.
std::string deadlock() {
    std::map<std::string, std::vector<unsigned>> waits;
    for (unsigned i = 0; i < block->threads; ++i) {
        const Fibre& fibre = block->fibres[i];
        const Meeting& m = fibre.meeting;
        char place[512] = "have exited";
        if (fibre.state == Fibre::waiting)
            std::snprintf(place, sizeof place, m.mask ? "wait at %s (%s:%d) for lanes %08x" : "wait at %s (%s:%d)",
                          m.what, m.file, m.line, m.mask);
        waits[place].push_back(i);
    }
    std::string text = "divergent threads never meet:";
    for (const auto& [place, who] : waits)
        text += " " + std::to_string(who.size()) + " (thread " + std::to_string(who[0]) + ", ...) " + place + ";";
    return text;
}

// This fibre has stopped: another goes on, or the block is done or stuck.
void go_on(Fibre& from) {
    if (block->ready.empty()) {
        if (block->exited < block->threads) block->error = deadlock();
        return switch_stacks(&from.sp, &from.fake_stack, block->main_sp, block->main_stack, block->main_stack_bytes);
    }
    const unsigned next = draw();
    if (&block->fibres[next] != &from) go_to(next, &from.sp, &from.fake_stack);
}

void fibre_main() {
    arrive(nullptr);
    Fibre& self = block->fibres[block->current];
    for (;;) {  // resumed once for every block it belongs to
        (*block->kernel)();
        self.state = Fibre::exited;
        ++block->exited;
        go_on(self);
    }
}

bool same_place(const Meeting& a, const Meeting& b) {
    return a.line == b.line && a.mask == b.mask && !std::strcmp(a.what, b.what) && !std::strcmp(a.file, b.file);
}

void run_block(dim3 index) {
    blockIdx = {index.x, index.y, index.z};
    block->exited = block->block_waits = 0;
    block->warp_waits.assign((block->threads + 31) / 32, 0);
    block->ready.resize(block->threads);
    std::iota(block->ready.begin(), block->ready.end(), 0u);
    for (unsigned i = 0; i < block->threads; ++i) {
        Fibre& fibre = block->fibres[i];
        fibre.state = Fibre::ready;
        fibre.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
        fibre.copies.clear();
        fibre.groups.clear();
    }
    block->from_main = true;
    go_to(draw(), &block->main_sp, &block->main_fake_stack);
    for (const auto& memory : block->memory) std::free(memory.data);
    block->memory.clear();
}

std::string format_of(dim3 d) {
    return "(" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z) + ")";
}

void check_limits(dim3 grid, dim3 threads, size_t shared_bytes) {
    const auto total = uint64_t{threads.x} * threads.y * threads.z;
    if (!grid.x || !grid.y || !grid.z || !total) throw std::runtime_error("an empty grid or block");
    if (grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535)
        throw std::runtime_error("grid " + format_of(grid) + "; a device takes (2147483647, 65535, 65535)");
    if (total > 1024 || threads.x > 1024 || threads.y > 1024 || threads.z > 64)
        throw std::runtime_error("block " + format_of(threads) + "; a device takes 1024 threads, (1024, 1024, 64)");
    const auto limit = kArchs.at(arch()).shared_per_block;
    if (shared_bytes > static_cast<size_t>(limit))
        throw std::runtime_error(std::to_string(shared_bytes) + " bytes of shared memory; sm_" +
                                 std::to_string(arch()) + " has " + std::to_string(limit) + " for a block");
}

void* allocate_shared(const void* site, size_t bytes) {
    void* data = nullptr;
    if (posix_memalign(&data, 128, bytes)) throw std::bad_alloc();
    std::memset(data, 0xff, bytes);
    block->memory.push_back({site, static_cast<char*>(data), bytes});
    return data;
}

}  // namespace

void launch(const char* name, dim3 grid, dim3 threads, size_t shared_bytes, const std::function<void()>& kernel) {
    static std::mutex one_at_a_time;  // autograd launches from threads of its own
    const std::lock_guard<std::mutex> lock(one_at_a_time);
    try {
        check_limits(grid, threads, shared_bytes);
    } catch (const std::runtime_error& error) {
        throw std::runtime_error(std::string("simt: launch of ") + name + ": " + error.what());
    }
    static const std::unique_ptr<Block> owner(block = new Block);
    block->name = name;
    block->kernel = &kernel;
    block->threads = threads.x * threads.y * threads.z;
    block->dynamic_bytes = shared_bytes;
    block->error.clear();
    blockDim = threads;
    gridDim = grid;
    std::vector<uint64_t> order(uint64_t{grid.x} * grid.y * grid.z);
    std::iota(order.begin(), order.end(), uint64_t{0});
    std::shuffle(order.begin(), order.end(), block->random);
    for (const uint64_t i : order) {
        const dim3 index(i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y);
        run_block(index);
        if (block->error.empty()) continue;
        for (Fibre& fibre : block->fibres) fibre.sp = nullptr;  // abandoned where they stood
        throw std::runtime_error(std::string("simt: ") + name + ", block " + format_of(index) + ": " + block->error);
    }
}

void fault(const char* format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    block->error = text;
    Fibre& self = block->fibres[block->current];
    switch_stacks(&self.sp, &self.fake_stack, block->main_sp, block->main_stack, block->main_stack_bytes);
    std::abort();  // an abandoned fibre is not resumed
}

void meet(Meeting meeting, Act act) {
    const unsigned me = block->current;
    Fibre& self = block->fibres[me];
    self.meeting = meeting;
    self.state = Fibre::waiting;
    const unsigned first = meeting.mask ? me / 32 * 32 : 0;
    const unsigned last = meeting.mask ? std::min<size_t>(first + 32, block->threads) : block->threads;
    auto takes_part = [&](unsigned i) { return !meeting.mask || meeting.mask >> (i - first) & 1; };
    if (!takes_part(me))
        fault("lane %u calls %s (%s:%d) for lanes %08x, without itself", me - first, meeting.what, meeting.file,
              meeting.line, meeting.mask);
    unsigned& waits = meeting.mask ? block->warp_waits[me / 32] : block->block_waits;
    const size_t expected = meeting.mask ? __builtin_popcount(meeting.mask) : block->threads;
    bool all = ++waits >= expected && last - first >= expected;
    for (unsigned i = first; i < last && all; ++i) {
        const Fibre& other = block->fibres[i];
        all = !takes_part(i) || (other.state == Fibre::waiting && same_place(other.meeting, meeting));
    }
    if (!all) return go_on(self);
    void* requests[32] = {};
    for (unsigned i = first; i < last; ++i) {
        if (!takes_part(i)) continue;
        if (meeting.mask) requests[i - first] = block->fibres[i].meeting.request;
        block->fibres[i].state = Fibre::ready;
        block->ready.push_back(i);
    }
    waits -= expected;
    if (act) act(requests);
    go_on(self);
}

unsigned lane() { return block->current % 32; }

void* shared(const void* site, size_t bytes) {
    size_t total = bytes + block->dynamic_bytes;
    for (const auto& memory : block->memory) {
        if (memory.site == site) return memory.data;
        if (memory.site) total += memory.bytes;
    }
    const size_t limit = kArchs.at(arch()).shared_per_block;
    if (total - block->dynamic_bytes > 48 << 10) fault("%zu bytes of static shared memory; 49152 can be had", total);
    if (total > limit) fault("%zu bytes of shared memory; sm_%d has %zu for a block", total, arch(), limit);
    return allocate_shared(site, bytes);
}

unsigned char* dynamic_shared() {
    for (const auto& memory : block->memory)
        if (!memory.site) return reinterpret_cast<unsigned char*>(memory.data);
    return static_cast<unsigned char*>(allocate_shared(nullptr, block->dynamic_bytes));
}

bool is_shared(const void* p, size_t bytes) {
    const char* at = static_cast<const char*>(p);
    for (const auto& memory : block->memory)
        if (at >= memory.data && at + bytes <= memory.data + memory.bytes) return true;
    return false;
}

void cp_async(void* target, const void* source, int bytes, bool valid) {
    if (reinterpret_cast<uintptr_t>(target) % bytes || reinterpret_cast<uintptr_t>(source) % bytes)
        fault("cp_async of %d bytes between addresses that are not aligned to them", bytes);
    if (!is_shared(target, bytes)) fault("cp_async of %d bytes to what is not shared memory", bytes);
    std::memset(target, 0xff, bytes);
    block->fibres[block->current].copies.push_back({target, source, bytes, valid});
}

void cp_async_commit() {
    Fibre& self = block->fibres[block->current];
    self.groups.push_back(self.copies.size());
}

void cp_async_wait(int pending) {
    auto& copies = block->fibres[block->current].copies;
    auto& groups = block->fibres[block->current].groups;
    if (groups.size() <= static_cast<size_t>(pending)) return;
    const size_t done = groups.size() - pending, arrived = groups[done - 1];
    for (size_t i = 0; i < arrived; ++i) {
        const Copy& copy = copies[i];
        if (copy.valid)
            std::memcpy(copy.target, copy.source, copy.bytes);
        else
            std::memset(copy.target, 0, copy.bytes);
    }
    copies.erase(copies.begin(), copies.begin() + arrived);
    groups.erase(groups.begin(), groups.begin() + done);
    for (size_t& end : groups) end -= arrived;
}

}  // namespace simt

// The host calls of adapters and launchers, for one emulated device.
extern "C" {
cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    const auto& limits = simt::kArchs.at(simt::arch());
    switch (attribute) {
        case cudaDevAttrMultiProcessorCount:
            *value = simt::kMultiprocessors;
            break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin:
            *value = limits.shared_per_block;
            break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
            *value = limits.shared_per_multiprocessor;
            break;
        case cudaDevAttrComputeCapabilityMajor:
            *value = simt::arch() / 10;
            break;
        case cudaDevAttrComputeCapabilityMinor:
            *value = simt::arch() % 10;
            break;
        default:
            return cudaErrorInvalidValue;
    }
    return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) { return "an error of the emulated device"; }
// As libtorch_cuda has it: the current stream of a device.
int32_t aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
    *stream = nullptr;
    return 0;
}
}
