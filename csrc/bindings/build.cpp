// Facts of the build and of this CPU, for `python -m fastbert.info`.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "../cpu/isa.h"

PYBIND11_MODULE(_build, m) {
    using namespace fastbert::cpu;
    m.doc() = "Facts of fastbert's native build.";
    m.attr("compiler") = std::string(FASTBERT_COMPILER " " __VERSION__);
    m.attr("sanitized") = FASTBERT_SANITIZED == 1;
    m.def(
        "instruction_sets", [] { return std::vector<std::string>(kIsaNames, kIsaNames + isa_count); },
        "The instruction sets the CPU kernels were compiled for, least first.");
    m.def(
        "instruction_set", [] { return kIsaNames[current_isa()]; },
        "The one in use: the best this CPU has, or the lesser one FASTBERT_CPU_ISA names.");
}
