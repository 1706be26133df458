// The Python module of the extension: a few plain functions. The kernels are dispatcher ops (csrc/cpu).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/version.h>

#include <array>
#include <map>
#include <string>

#include "autograd/autograd.h"
#include "math/philox.h"

// A quoted define would have to survive a shell or not, depending on who builds.
#define CKPT_TEXT_OF(x) #x
#define CKPT_TEXT(x) CKPT_TEXT_OF(x)

namespace {

const char* instruction_set() { return CKPT_TEXT(CKPT_OPS_ISA); }

std::map<std::string, std::string> build_info() {
  return {{"torch", TORCH_VERSION}, {"compiler", __VERSION__}, {"isa", instruction_set()}};
}

std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  uint32_t c[4] = {counter[0], counter[1], counter[2], counter[3]};
  ckpt::philox4x32_7(c, key[0], key[1]);
  return {c[0], c[1], c[2], c[3]};
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("build_info", &build_info, "The torch version, compiler and instruction set this library was built for.");
  m.def("instruction_set", &instruction_set, "The instruction set this library was compiled for: \"avx2\" or \"default\".");
  if (!ckpt::add_autograd(m.ptr())) throw pybind11::error_already_set();
  m.def("philox", &philox, "Four words of Philox4x32-7 for a counter of 4 and a key of 2 words.");
}
