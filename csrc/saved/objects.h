// Python objects in C++, and the classes of ckpt_ops/saved/recipe.py.
#pragma once
#include <torch/csrc/Device.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/object_ptr.h>

namespace ckpt::saved {

using at::Tensor;
using Object = THPObjectPtr;  // owned

inline Object checked(PyObject* object) {
  if (object == nullptr) throw python_error();
  return Object(object);
}

inline void checked(int status) {
  if (status < 0) throw python_error();
}

inline Object shared(PyObject* borrowed) { return Object(Py_NewRef(borrowed)); }
inline Object whole(int64_t number) { return checked(PyLong_FromLongLong(number)); }

inline int64_t number(PyObject* object) {
  const int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) throw python_error();
  return value;
}

template <class... Objects>
Object tuple(Objects... items) {
  Object made = checked(PyTuple_New(sizeof...(items)));
  Py_ssize_t i = 0;
  (PyTuple_SET_ITEM(made.get(), i++, items.release()), ...);
  return made;
}

// One of a class's __slots__.
class Slot {
 public:
  Slot(PyObject* type, const char* name) : descriptor_(checked(PyObject_GetAttrString(type, name)).release()) {}

  Object get(PyObject* object) const {
    return checked(Py_TYPE(descriptor_)->tp_descr_get(descriptor_, object, reinterpret_cast<PyObject*>(Py_TYPE(object))));
  }

  void set(PyObject* object, PyObject* value) const { checked(Py_TYPE(descriptor_)->tp_descr_set(descriptor_, object, value)); }

 private:
  PyObject* descriptor_;
};

struct Class {
  PyObject* type;

  Class(PyObject* module, const char* name) : type(checked(PyObject_GetAttrString(module, name)).release()) {}

  // An object whose slots are empty.
  Object blank() const {
    Object no_arguments = tuple();
    auto* made = reinterpret_cast<PyTypeObject*>(type);
    return checked(made->tp_new(made, no_arguments, nullptr));
  }
};

// The classes and their slots. Kept for the life of the process.
struct Python {
  Object recipes = checked(PyImport_ImportModule("ckpt_ops.saved.recipe"));

  struct Recipe : Class {
    Slot name{type, "name"}, fn{type, "fn"}, inputs{type, "inputs"}, guards{type, "guards"}, autocast{type, "autocast"},
        nbytes{type, "nbytes"}, handles{type, "handles"}, runs{type, "runs"}, source{type, "source"}, values{type, "_values"},
        left{type, "_left"};
  } recipe{Class(recipes, "Recipe")};

  Class handle{recipes, "Handle"}, stored{recipes, "Stored"};  // which know of those in C++

  Object word_recipe = checked(PyUnicode_InternFromString("recipe"));
  Object autocast_state = checked(PyObject_GetAttrString(recipes, "autocast_state"));
  Object cast_of = checked(PyObject_GetAttrString(recipes, "cast_of"));
  Object raise_modified = checked(PyObject_GetAttrString(recipes, "raise_modified"));
  Object counter = checked(PyObject_GetAttrString(checked(PyImport_ImportModule("collections")), "Counter"));
};

PyTypeObject* handle_type();
PyTypeObject* stored_type();

inline Python& python() {
  static Python* made = nullptr;  // not a guarded static: an import may hand the interpreter to another thread
  if (made == nullptr) {
    auto python = std::make_unique<Python>();
    checked(PyObject_CallMethod(python->handle.type, "register", "O", handle_type()));
    checked(PyObject_CallMethod(python->stored.type, "register", "O", stored_type()));
    made = python.release();
  }
  return *made;
}

inline bool is_exactly_tensor(PyObject* object) { return reinterpret_cast<PyObject*>(Py_TYPE(object)) == THPVariableClass; }
inline bool is_exactly_parameter(PyObject* object) { return reinterpret_cast<PyObject*>(Py_TYPE(object)) == ParameterClass; }

inline uint32_t version(const Tensor& t) { return t.unsafeGetTensorImpl()->version_counter().current_version(); }

inline bool has_history(const Tensor& t) { return torch::autograd::impl::grad_fn_unsafe(t) != nullptr || t.grad_fn() != nullptr; }

// Whether it belongs to a transform of torch.func.
inline bool in_torch_func(const Tensor& t) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet keys({DispatchKey::FuncTorchGradWrapper, DispatchKey::FuncTorchBatched, DispatchKey::Functionalize});
  return t.key_set().has_any(keys);
}

// The tensor without its history: a quick detach.
inline Tensor without_history(const Tensor& t) {
  if (!has_history(t)) return t;
  return in_torch_func(t) || t.unsafeGetTensorImpl()->is_python_dispatch() ? t.detach() : t.tensor_data();
}

}  // namespace ckpt::saved
