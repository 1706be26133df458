// Makes the recipes of ckpt_ops/saved/recipe.py. What they do is Python's.
#pragma once
#include <ATen/autocast_mode.h>

#include "saved/objects.h"

namespace ckpt::saved {

inline Object autocast_state(const Tensor& t) {
  Object device = checked(THPDevice_New(t.device()));
  if ((t.is_cpu() || t.is_cuda()) && !at::autocast::is_autocast_enabled(t.device().type())) {
    return tuple(std::move(device), shared(Py_False), shared(Py_None));
  }
  return checked(PyObject_CallOneArg(python().autocast_state, device));
}

// inputs: a list of what the recipe holds. guards, outputs: fast sequences (PySequence_Fast) of tensors.
inline Object make_recipe(PyObject* name, PyObject* fn, PyObject* inputs, PyObject* guards, PyObject* outputs) {
  const auto& recipe = python().recipe;
  Object versions = checked(PyList_New(0)), sizes = checked(PyList_New(0));
  for (PyObject* sequence : {guards, inputs}) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence); ++i) {
      PyObject* t = PySequence_Fast_GET_ITEM(sequence, i);
      if (THPVariable_Check(t)) checked(PyList_Append(versions, tuple(shared(t), whole(version(THPVariable_Unpack(t))))));
    }
  }
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(outputs); ++i) {
    checked(PyList_Append(sizes, whole(THPVariable_Unpack(PySequence_Fast_GET_ITEM(outputs, i)).storage().nbytes())));
  }
  Object made = recipe.blank(), zero = whole(0);
  recipe.name.set(made, name);
  recipe.fn.set(made, fn);
  recipe.inputs.set(made, inputs);
  recipe.guards.set(made, versions);
  recipe.autocast.set(made, autocast_state(THPVariable_Unpack(PySequence_Fast_GET_ITEM(outputs, 0))));
  recipe.nbytes.set(made, sizes);
  for (const Slot* slot : {&recipe.handles, &recipe.runs, &recipe.left}) slot->set(made, zero);
  for (const Slot* slot : {&recipe.source, &recipe.values}) slot->set(made, Py_None);
  return made;
}

}  // namespace ckpt::saved
