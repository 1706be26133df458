// What the Python module takes from autograd.cpp.
#pragma once
#include <Python.h>

namespace ckpt {

// Adds every op's function and the engine to the module; false with Python's error set where that fails.
bool add_autograd(PyObject* module);

}  // namespace ckpt
