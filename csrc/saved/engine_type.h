// The engine as a Python type.
#pragma once
#include <structmember.h>

#include "saved/engine.h"

namespace ckpt::saved::type {

inline Engine* engine(PyObject* self) { return reinterpret_cast<Engine*>(self); }

inline PyObject* create(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  int accepts = 1;
  PyObject* verifier = Py_None;
  static const char* names[] = {"accepts", "verifier", nullptr};
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|pO:Engine", const_cast<char**>(names), &accepts, &verifier)) return nullptr;
  Object made = checked(type->tp_alloc(type, 0));
  Engine& self = *engine(made);
  self.accepts = accepts;
  self.caller = Py_NewRef(Py_None);
  self.verifier = Py_NewRef(verifier);
  self.offloader = Py_NewRef(Py_None);
  self.watch = Py_NewRef(Py_None);
  self.replaced = checked(PyObject_CallNoArgs(python().counter)).release();
  self.refused = checked(PyDict_New()).release();
  self.table = new Table;
  return made.release();
  END_HANDLE_TH_ERRORS
}

inline int traverse(PyObject* self, visitproc visit, void* arg) {
  const Engine& e = *engine(self);
  for (PyObject* held : {e.caller, e.verifier, e.offloader, e.watch, e.replaced, e.refused}) Py_VISIT(held);
  return e.table != nullptr ? e.table->visit(visit, arg) : 0;
}

inline int drop(PyObject* self) {
  Engine& e = *engine(self);
  if (e.table != nullptr) e.table->clear();
  for (PyObject** held : {&e.caller, &e.verifier, &e.offloader, &e.watch, &e.replaced, &e.refused}) Py_CLEAR(*held);
  return 0;
}

inline void destroy(PyObject* self) {
  PyObject_GC_UnTrack(self);
  drop(self);
  delete engine(self)->table;
  Py_TYPE(self)->tp_free(self);
}

// register(name, fn, inputs, outputs, guards=(), module=None)
inline PyObject* register_outputs(PyObject* self, PyObject* const* values, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count < 4 || count > 6) return PyErr_Format(PyExc_TypeError, "Engine.register takes 4 to 6 arguments, got %zd", count);
  const auto sequence = [](PyObject* value) { return checked(PySequence_Fast(value, "Engine.register takes sequences of tensors")); };
  Object inputs = sequence(values[2]), outputs = sequence(values[3]), guards = count > 4 ? sequence(values[4]) : tuple();
  engine(self)->register_outputs(values[0], values[1], inputs, outputs, guards, count > 5 ? values[5] : Py_None);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

inline PyObject* as_result(Object object) { return object.release(); }
inline PyObject* as_result(bool value) { return PyBool_FromLong(value); }

template <auto Method>
PyObject* with_one_argument(PyObject* self, PyObject* argument) {
  HANDLE_TH_ERRORS
  return as_result((engine(self)->*Method)(argument));
  END_HANDLE_TH_ERRORS
}

template <auto Method>
PyObject* without_arguments(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  return as_result((engine(self)->*Method)());
  END_HANDLE_TH_ERRORS
}

inline PyObject* clear(PyObject* self, PyObject*) {
  engine(self)->clear();
  Py_RETURN_NONE;
}

inline PyObject* registered(PyObject* self, void*) { return PyLong_FromSize_t(engine(self)->table->size()); }

inline PyMethodDef methods[] = {
    {"register", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(register_outputs)), METH_FASTCALL, nullptr},
    {"pack", with_one_argument<&Engine::pack>, METH_O, nullptr},
    {"unpack", with_one_argument<&Engine::unpack>, METH_O, nullptr},
    {"replace", with_one_argument<&Engine::replace>, METH_O, nullptr},
    {"knows", with_one_argument<&Engine::knows>, METH_O, nullptr},
    {"on_top", without_arguments<&Engine::on_top>, METH_NOARGS, nullptr},
    {"takes", without_arguments<&Engine::takes>, METH_NOARGS, nullptr},
    {"clear", clear, METH_NOARGS, nullptr},
    {},
};

inline PyMemberDef members[] = {
    {"accepts", T_BOOL, offsetof(Engine, accepts), 0, nullptr},
    {"caller", T_OBJECT, offsetof(Engine, caller), 0, nullptr},
    {"verifier", T_OBJECT, offsetof(Engine, verifier), READONLY, nullptr},
    {"offloader", T_OBJECT, offsetof(Engine, offloader), 0, nullptr},
    {"watch", T_OBJECT, offsetof(Engine, watch), 0, nullptr},
    {"replaced", T_OBJECT, offsetof(Engine, replaced), READONLY, nullptr},
    {"refused", T_OBJECT, offsetof(Engine, refused), READONLY, nullptr},
    {},
};

inline PyGetSetDef computed[] = {{"registered", registered, nullptr, nullptr, nullptr}, {}};

inline PyTypeObject* ready() {
  static PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "ckpt_ops._C.Engine";
  type.tp_doc = "ckpt_ops.saved.engine.Engine, in C++.";
  type.tp_basicsize = sizeof(Engine);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
  type.tp_new = create;
  type.tp_traverse = traverse;
  type.tp_clear = drop;
  type.tp_dealloc = destroy;
  type.tp_methods = methods;
  type.tp_members = members;
  type.tp_getset = computed;
  return PyType_Ready(&type) == 0 ? &type : nullptr;
}

}  // namespace ckpt::saved::type
