// What the Python module takes from this folder.
#pragma once
#include <Python.h>

namespace ckpt {

// Adds every op's function to the module; false with Python's error set where that fails.
bool add_autograd_functions(PyObject* module);

}  // namespace ckpt
