// What autograd holds instead of a tensor: `Handle` of ckpt_ops/saved/recipe.py, its place without Python objects.
#pragma once
#include <structmember.h>

#include "saved/objects.h"

namespace ckpt::saved {

struct Handle {
  PyObject_HEAD
  PyObject* recipe;
  int64_t index, offset;
  c10::SmallVector<int64_t, 5> sizes, strides;
};

inline Handle* handle(PyObject* self) { return reinterpret_cast<Handle*>(self); }

inline PyObject* handle_tensor(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  const Handle& h = *handle(self);
  Object value = checked(PyObject_CallMethod(h.recipe, "take", "L", static_cast<long long>(h.index)));
  return THPVariable_Wrap(THPVariable_Unpack(value).as_strided(h.sizes, h.strides, h.offset));
  END_HANDLE_TH_ERRORS
}

inline PyObject* handle_held(PyObject* self, PyObject*) { return PyObject_CallMethod(handle(self)->recipe, "held", nullptr); }

inline PyTypeObject* handle_type() {
  static PyMethodDef methods[] = {{"tensor", handle_tensor, METH_NOARGS, nullptr}, {"held", handle_held, METH_NOARGS, nullptr}, {}};
  static PyMemberDef members[] = {{"recipe", T_OBJECT, offsetof(Handle, recipe), READONLY, nullptr}, {}};
  static PyTypeObject type = [] {
    PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
    type.tp_name = "ckpt_ops._C.Handle";
    type.tp_doc = "ckpt_ops.saved.recipe.Handle, in C++.";
    type.tp_basicsize = sizeof(Handle);
    type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
    type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
      Py_VISIT(handle(self)->recipe);
      return 0;
    };
    type.tp_dealloc = [](PyObject* self) {
      PyObject_GC_UnTrack(self);
      Handle& h = *handle(self);
      h.sizes.~SmallVector();
      h.strides.~SmallVector();
      Py_DECREF(h.recipe);
      Py_TYPE(self)->tp_free(self);
    };
    type.tp_methods = methods;
    type.tp_members = members;
    return type;
  }();
  return &type;
}

// A handle of the tensor, which lies on output `index` of the recipe.
inline Object make_handle(PyObject* recipe, int64_t index, PyObject* t) {
  const auto& slots = python().recipe;
  if (slots.source.get(recipe).get() != Py_None) {  // within a verify(), which keeps the original beside it
    return checked(PyObject_CallFunction(python().handle.type, "OLO", recipe, static_cast<long long>(index), t));
  }
  slots.handles.set(recipe, whole(number(slots.handles.get(recipe)) + 1));
  static PyTypeObject* type = handle_type();
  Object made = checked(type->tp_alloc(type, 0));
  Handle& h = *handle(made);
  const Tensor& tensor = THPVariable_Unpack(t);
  h.recipe = Py_NewRef(recipe);
  h.index = index;
  h.offset = tensor.storage_offset();
  new (&h.sizes) auto(c10::SmallVector<int64_t, 5>(tensor.sizes()));
  new (&h.strides) auto(c10::SmallVector<int64_t, 5>(tensor.strides()));
  return made;
}

}  // namespace ckpt::saved
