// What the ops of this folder share. Each does in one call, for plain tensors, what its Python function does in many: the checks,
// the kernel, the graph node. Whatever is not plain it declines, with None: Python then serves the call, or says what is wrong.
#pragma once
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <array>
#include <limits>
#include <string>

#include "common/check.h"

namespace ckpt {

using at::Tensor;

inline bool wrapped(const Tensor& t) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet wrappers({DispatchKey::FuncTorchGradWrapper, DispatchKey::FuncTorchBatched, DispatchKey::Functionalize,
                                          DispatchKey::Python, DispatchKey::ZeroTensor, DispatchKey::Negative});
  return t.key_set().has_any(wrappers);
}

// Dense, in a dtype and on a device of the kernels, nothing of torch.func around it.
inline bool plain(const Tensor& t) {
  const auto dtype = t.scalar_type();
  return t.layout() == at::kStrided && (t.is_cpu() || t.is_cuda()) && !wrapped(t) &&
         (dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf);
}

inline Tensor or_undefined(const OptionalTensor& t) { return t ? *t : Tensor(); }
inline OptionalTensor if_defined(const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }

// Where a mask lies: what an op with randomness takes beside its tensors, checked by ckpt_ops/seeds.py.
struct Place {
  OptionalTensor seed;  // none at p = 0 and 1
  double p = 0;
  int64_t stream = 0;
  std::array<int64_t, 3> origin{};

  // Into a node and out of it. The seed is saved with the tensors.
  void keep(torch::autograd::AutogradContext* ctx) const {
    ctx->saved_data["p"] = p;
    ctx->saved_data["stream"] = stream;
    ctx->saved_data["origin"] = at::IntArrayRef(origin);
  }

  static Place of(torch::autograd::AutogradContext* ctx, const Tensor& seed) {
    const auto origin = ctx->saved_data["origin"].toIntVector();
    return {if_defined(seed), ctx->saved_data["p"].toDouble(), ctx->saved_data["stream"].toInt(), {origin[0], origin[1], origin[2]}};
  }
};

// The arguments of a call from Python, read one by one; `declined` once one is not what it ought to be.
class Arguments {
 public:
  Arguments(PyObject* const* values, Py_ssize_t count) : next_(values), end_(values + count) {
    declined = at::impl::torch_function_mode_enabled();
  }

  bool declined;

  // The named backend: none, or the one of the input's device.
  void backend(const Tensor& input) {
    PyObject* name = take();
    if (declined || name == Py_None) return;
    declined = !PyUnicode_Check(name) || PyUnicode_CompareWithASCIIString(name, input.is_cpu() ? "cpu" : "cuda") != 0;
  }

  Tensor tensor() {
    PyObject* value = take();
    if (declined || (declined = !THPVariable_CheckExact(value))) return {};
    Tensor t = THPVariable_Unpack(value);
    declined = !plain(t);
    return t;
  }

  // A parameter of these sizes on the input's device, or None.
  OptionalTensor parameter(const Tensor& input, at::IntArrayRef sizes) {
    PyObject* value = take();
    if (declined || value == Py_None || (declined = !THPVariable_CheckExact(value))) return std::nullopt;
    Tensor t = THPVariable_Unpack(value);
    declined = !plain(t) || t.sizes() != sizes || t.device() != input.device();
    return t;
  }

  // Like tensor(), or None.
  OptionalTensor optional_tensor() {
    if (next_ != end_ && *next_ == Py_None) return ++next_, std::nullopt;
    return tensor();
  }

  // A tensor of any dtype, or None.
  OptionalTensor optional_any() {
    PyObject* value = take();
    if (declined || value == Py_None || (declined = !THPVariable_CheckExact(value))) return std::nullopt;
    const Tensor t = THPVariable_Unpack(value);
    declined = wrapped(t);
    return t;
  }

  // seed, p, stream, origin
  Place place() {
    Place place{optional_any(), number()};
    place.stream = integer(take());
    PyObject* origin = take();
    if (declined || (declined = !PyTuple_CheckExact(origin) || PyTuple_GET_SIZE(origin) != 3)) return place;
    for (int i = 0; i < 3; ++i) place.origin[i] = integer(PyTuple_GET_ITEM(origin, i));
    return place;
  }

  int64_t whole_number() { return integer(take()); }

  std::string text() {
    PyObject* value = take();
    const char* characters = !declined && PyUnicode_CheckExact(value) ? PyUnicode_AsUTF8(value) : nullptr;
    if (characters != nullptr) return characters;
    decline();
    return {};
  }

  // The last argument: whose kernels.
  void namespace_is_ours() { declined = text() != "ckpt_ops" || declined || next_ != end_; }

  // The last sizes of the input: an int or a sequence of them.
  c10::SmallVector<int64_t, 4> normalized_shape(const Tensor& input) {
    PyObject* value = take();
    c10::SmallVector<int64_t, 4> sizes;
    if (declined) return sizes;
    if (PyTuple_Check(value)) {
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) sizes.push_back(integer(PyTuple_GET_ITEM(value, i)));
    } else {
      sizes.push_back(integer(value));
    }
    declined = declined || sizes.empty() || int64_t(sizes.size()) > input.dim() ||
               input.sizes().slice(input.dim() - sizes.size()) != at::IntArrayRef(sizes);
    return sizes;
  }

  double number() {
    PyObject* value = take();
    if (declined || (declined = !PyFloat_CheckExact(value))) return 0;
    return PyFloat_AS_DOUBLE(value);
  }

  // A number, or None: the machine epsilon of the dtype that statistics of the input are computed in.
  double epsilon(const Tensor& input) {
    if (next_ == end_ || *next_ != Py_None) return number();
    ++next_;
    return input.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon();
  }

 private:
  PyObject* const* next_;
  PyObject* const* end_;

  // Also where Python could not convert a value.
  void decline() {
    PyErr_Clear();
    declined = true;
  }

  PyObject* take() {
    if (next_ == end_) declined = true;
    return declined ? Py_None : *next_++;
  }

  int64_t integer(PyObject* value) {
    const long long number = !declined && PyLong_CheckExact(value) ? PyLong_AsLongLong(value) : -1;
    if (number < 0) decline();  // nothing that is asked for is negative
    return number;
  }
};

template <class Signature>
c10::TypedOperatorHandle<Signature> kernel(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Whether a compiled kernel serves tensors like this one.
template <class Op>
bool serves(const Op& op, const Tensor& t) {
  return op.hasKernelForDispatchKey(t.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
}

// Calls a kernel without the interpreter's lock. Around it the lock is held: where saved-tensor hooks stand, every tensor that a node
// saves would take it.
template <class Op, class... Values>
auto compute(const Op& op, Values&&... values) {
  std::optional<pybind11::gil_scoped_release> released;
  if (PyGILState_Check()) released.emplace();
  return op.call(std::forward<Values>(values)...);
}

inline bool needs_graph(const Tensor& t) { return t.requires_grad(); }
inline bool needs_graph(const OptionalTensor& t) { return given(t) && t->requires_grad(); }

template <class... T>
bool recorded(const T&... tensors) {
  return c10::GradMode::is_enabled() && (needs_graph(tensors) || ...);
}

// A kernel's parameter gradient in the parameter's dtype; undefined where it was not asked for.
inline Tensor parameter_gradient(const Tensor& grad, const c10::IValue& dtype, bool needed) {
  return needed ? grad.to(dtype.toScalarType()) : Tensor();
}

// Passes gradients on; differentiating them raises.  Twin: ckpt_ops/ops/_common.py.
struct FirstDerivativeOnly : torch::autograd::Function<FirstDerivativeOnly> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, const std::string& name,
                                                at::TensorList grads, at::TensorList /*inputs*/) {
    ctx->saved_data["name"] = name;
    torch::autograd::variable_list out;
    for (const Tensor& grad : grads) out.push_back(grad.view_as(grad));
    return out;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx, const torch::autograd::variable_list&) {
    TORCH_CHECK(false, "ckpt_ops: ", ctx->saved_data["name"].toStringRef(),
                " has no double backward (its gradient is a fused kernel). Call it with backend=\"reference\", which can be "
                "differentiated as often as you like.");
  }
};

// Gradients as a function's backward returns them; under create_graph, a second derivative becomes a clear error.
inline void first_derivative_only(const char* name, torch::autograd::variable_list& grads, const torch::autograd::variable_list& from) {
  if (!c10::GradMode::is_enabled()) return;
  std::vector<Tensor> present, inputs;
  for (const Tensor& grad : grads) {
    if (grad.defined()) present.push_back(grad);
  }
  for (const Tensor& t : from) {
    if (t.defined()) inputs.push_back(t);
  }
  auto guarded = FirstDerivativeOnly::apply(std::string(name), at::TensorList(present), at::TensorList(inputs));
  auto next = guarded.begin();
  for (Tensor& grad : grads) {
    if (grad.defined()) grad = *next++;
  }
}

// Tensors as a tuple.
inline PyObject* as_tuple(std::initializer_list<Tensor> tensors) {
  THPObjectPtr tuple(PyTuple_New(tensors.size()));
  Py_ssize_t i = 0;
  for (const Tensor& t : tensors) PyTuple_SET_ITEM(tuple.get(), i++, THPVariable_Wrap(t));
  return tuple.release();
}

}  // namespace ckpt
