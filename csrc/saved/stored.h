// What autograd holds of a tensor that is kept: `Stored` of ckpt_ops/saved/recipe.py, without a Python object for its tensor.
#pragma once
#include "saved/objects.h"

namespace ckpt::saved {

struct Stored {
  PyObject_HEAD
  Tensor kept;
  uint32_t version;
};

inline Stored* stored(PyObject* self) { return reinterpret_cast<Stored*>(self); }

inline PyObject* stored_tensor(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  const Stored& s = *stored(self);
  if (version(s.kept) == s.version) return THPVariable_Wrap(s.kept);
  return PyObject_CallFunction(python().raise_modified, "NI", THPVariable_Wrap(s.kept), s.version);
  END_HANDLE_TH_ERRORS
}

inline PyObject* stored_held(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  return tuple(checked(THPVariable_Wrap(stored(self)->kept))).release();
  END_HANDLE_TH_ERRORS
}

inline PyTypeObject* stored_type() {
  static PyMethodDef methods[] = {{"tensor", stored_tensor, METH_NOARGS, nullptr}, {"held", stored_held, METH_NOARGS, nullptr}, {}};
  static PyTypeObject type = [] {
    PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
    type.tp_name = "ckpt_ops._C.Stored";
    type.tp_doc = "ckpt_ops.saved.recipe.Stored, in C++.";
    type.tp_basicsize = sizeof(Stored);
    type.tp_flags = Py_TPFLAGS_DEFAULT;
    type.tp_dealloc = [](PyObject* self) {
      stored(self)->kept.~Tensor();
      Py_TYPE(self)->tp_free(self);
    };
    type.tp_methods = methods;
    return type;
  }();
  return &type;
}

inline Object make_stored(PyObject* t) {
  static PyTypeObject* type = stored_type();
  Object made = checked(type->tp_alloc(type, 0));
  const Tensor& tensor = THPVariable_Unpack(t);
  new (&stored(made)->kept) Tensor(without_history(tensor));
  stored(made)->version = version(tensor);
  return made;
}

}  // namespace ckpt::saved
