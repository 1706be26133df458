// The engine of ckpt_ops/saved/engine.py, which says what each part of it is about. It runs in every forward, and autograd calls
// it for every tensor that is saved.
#pragma once
#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/PyInterpreter.h>

#include "saved/handle.h"
#include "saved/recipe.h"
#include "saved/stored.h"
#include "saved/table.h"

namespace ckpt::saved {

struct Engine {
  PyObject_HEAD
  char accepts;
  PyObject *caller, *verifier, *offloader, *watch;
  PyObject *replaced, *refused;
  Table* table;

  // A new reference: a handle, or t itself.
  Object replace(PyObject* t) {
    if (!is_exactly_tensor(t)) return shared(t);
    const Tensor& tensor = THPVariable_Unpack(t);
    if (tensor.layout() != at::kStrided || !tensor.has_storage()) return shared(t);
    const Table::Known entry = table->of_storage(tensor);
    if (entry == nullptr) return table->is_of_one_dtype(tensor) ? shared(t) : replace_cast(t);
    if (entry->storage.expired()) {
      table->remove(tensor);
    } else if (version(tensor) != entry->version) {
      Object reason = checked(PyUnicode_FromString("its output was modified in place afterwards"));
      Object name = python().recipe.name.get(entry->recipe);
      if (PyDict_SetDefault(refused, name, reason) == nullptr) throw python_error();
    } else if (tensor.scalar_type() == entry->dtype && !tensor.is_conj() && !tensor.is_neg()) {
      return make_handle(entry->recipe, entry->index, t);
    }
    return shared(t);
  }

  // The pack hook.
  Object pack(PyObject* t) {
    Object packed = replace(t);
    if (packed.get() != t) {
      count(packed);
    } else {
      packed = offloader == Py_None ? make_stored(t) : checked(PyObject_CallMethod(offloader, "keep", "O", t));
    }
    if (watch != Py_None) checked(PyObject_CallOneArg(watch, packed));
    return packed;
  }

  void register_outputs(PyObject* name, PyObject* fn, PyObject* inputs, PyObject* outputs, PyObject* guards, PyObject* module) {
    if (module == Py_None && caller != Py_None) name = caller;
    if (const auto reason = unfit(inputs, guards, outputs); !reason.empty()) {
      checked(PyDict_SetItem(refused, name, checked(PyUnicode_FromString(reason.c_str()))));
      return;
    }
    const Py_ssize_t inputs_count = PySequence_Fast_GET_SIZE(inputs);
    Object held = checked(PyList_New(inputs_count));
    for (Py_ssize_t i = 0; i < inputs_count; ++i) PyList_SET_ITEM(held.get(), i, input(PySequence_Fast_GET_ITEM(inputs, i)).release());
    Object recipe = make_recipe(name, fn, held, guards, outputs);
    if (verifier != Py_None) {
      python().recipe.source.set(recipe, checked(PyObject_CallMethod(verifier, "source", "OO", name, module)));
    }
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(outputs); ++i) {
      const Tensor& out = THPVariable_Unpack(PySequence_Fast_GET_ITEM(outputs, i));
      table->add(out, std::make_shared<Entry>(recipe.dup(), i, out));
    }
    table->sweep();
  }

  bool knows(PyObject* t) {
    if (!is_exactly_tensor(t)) return false;
    const Tensor& tensor = THPVariable_Unpack(t);
    const Table::Known entry = tensor.has_storage() ? table->of_storage(tensor) : nullptr;
    return entry != nullptr && !entry->storage.expired() && entry->version == version(tensor);
  }

  bool on_top() {
    const auto hooks = at::SavedTensorDefaultHooks::get_hooks();
    if (!hooks) return false;
    PyObject* pack = hooks->first.ptr(getPyInterpreter());
    return PyCFunction_Check(pack) && PyCFunction_GET_SELF(pack) == reinterpret_cast<PyObject*>(this);
  }

  // The unpack hook.
  Object unpack(PyObject* packed) { return checked(PyObject_CallMethod(packed, "tensor", nullptr)); }

  void clear() {
    table->clear();
    Py_SETREF(offloader, Py_NewRef(Py_None));
    Py_SETREF(watch, Py_NewRef(Py_None));
  }

  bool takes() { return accepts && c10::GradMode::is_enabled() && on_top(); }

 private:
  void count(PyObject* handle) {
    Object recipe = checked(PyObject_GetAttr(handle, python().word_recipe)), name = python().recipe.name.get(recipe);
    PyObject* before = PyDict_GetItemWithError(replaced, name);
    if (before == nullptr && PyErr_Occurred()) throw python_error();
    checked(PyDict_SetItem(replaced, name, whole((before != nullptr ? number(before) : 0) + 1)));
  }

  Object replace_cast(PyObject* t) {
    const Tensor& tensor = THPVariable_Unpack(t);
    const Tensor cast = tensor.is_view() ? Tensor(tensor._base()) : tensor;
    const auto& node = cast.grad_fn();
    if (node == nullptr || node->num_outputs() == 0) return shared(t);
    const Table::Known source = table->of_result(node->next_edge(0));
    if (source == nullptr || node->name() != "ToCopyBackward0") return shared(t);  // in this order: a name takes long to make
    const auto index = static_cast<long long>(source->index);
    Object recipe = checked(PyObject_CallFunction(python().cast_of, "OLNO", source->recipe.get(), index, THPVariable_Wrap(cast), verifier));
    table->add_storage(tensor, std::make_shared<Entry>(recipe.dup(), 0, cast));
    return make_handle(recipe, 0, t);
  }

  // What a recipe holds of its input.
  Object input(PyObject* t) {
    if (is_exactly_parameter(t) || !THPVariable_Check(t)) return shared(t);
    Object packed = replace(t);
    if (packed.get() != t) return packed;
    packed = Object(THPVariable_Wrap(without_history(THPVariable_Unpack(t))));
    return offloader == Py_None ? std::move(packed) : checked(PyObject_CallMethod(offloader, "origin", "O", packed.get()));
  }

  static std::string unfit(PyObject* inputs, PyObject* guards, PyObject* outputs) {
    c10::SmallVector<c10::StorageImpl*, 16> held;
    for (PyObject* sequence : {inputs, guards}) {
      for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence); ++i) {
        PyObject* value = PySequence_Fast_GET_ITEM(sequence, i);
        if (!THPVariable_Check(value)) continue;
        const Tensor& t = THPVariable_Unpack(value);
        if (!t.has_storage()) return "an input has no storage: it is sparse, or of another layout without one";
        if (t.is_inference()) return "an input is an inference tensor, which does not tell whether it was modified since";
        held.push_back(storage_key(t));
      }
    }
    if (PySequence_Fast_GET_SIZE(outputs) == 0) return "it returns nothing";
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(outputs); ++i) {
      PyObject* out = PySequence_Fast_GET_ITEM(outputs, i);
      if (!is_exactly_tensor(out) || THPVariable_Unpack(out).layout() != at::kStrided || in_torch_func(THPVariable_Unpack(out))) {
        const std::string kind = Py_TYPE(out)->tp_name;
        return "an output is a " + kind.substr(kind.rfind('.') + 1) + ", not a plain tensor";
      }
      if (std::find(held.begin(), held.end(), storage_key(THPVariable_Unpack(out))) != held.end()) {
        return "it returns its input's own memory (in place, or a view)";
      }
    }
    return {};
  }
};

}  // namespace ckpt::saved
