// The outputs that an engine knows: by their storage, and by the graph node that made them.
#pragma once
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <memory>
#include <unordered_map>

#include "saved/objects.h"

namespace ckpt::saved {

// A registered storage. It is known by a weak reference: an address is reused as soon as it is freed.
struct Entry {
  Object recipe;
  int64_t index;
  uint32_t version;
  at::ScalarType dtype;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;

  Entry(Object recipe, int64_t index, const Tensor& t)
      : recipe(std::move(recipe)),
        index(index),
        version(saved::version(t)),
        dtype(t.scalar_type()),
        storage(t.storage().getWeakStorageImpl()) {}
};

inline c10::StorageImpl* storage_key(const Tensor& t) { return t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl(); }

class Table {
  struct Result {
    decltype(torch::autograd::Edge::function) node;  // a shared pointer, of a kind that depends on torch's version
    uint32_t number;
    bool operator==(const Result& other) const { return node == other.node && number == other.number; }
  };
  struct ResultHash {
    size_t operator()(const Result& result) const { return std::hash<void*>()(result.node.get()) + result.number; }
  };

 public:
  using Known = std::shared_ptr<Entry>;  // shared: removing one may run Python code, which may come back here

  Known of_storage(const Tensor& t) const { return found(by_storage_, storage_key(t)); }
  Known of_result(const torch::autograd::Edge& edge) const { return found(by_result_, Result{edge.function, edge.input_nr}); }

  // Whether all registered outputs have the tensor's dtype.
  bool is_of_one_dtype(const Tensor& t) const { return dtype_ && !several_dtypes_ && t.scalar_type() == *dtype_; }

  void add(const Tensor& out, const Known& entry) {
    add_storage(out, entry);
    if (const auto& node = out.grad_fn()) put(by_result_, Result{node, out.output_nr()}, entry);
    several_dtypes_ = several_dtypes_ || (dtype_ && *dtype_ != entry->dtype);
    dtype_ = entry->dtype;
  }

  void add_storage(const Tensor& t, Known entry) { put(by_storage_, storage_key(t), std::move(entry)); }

  void remove(const Tensor& t) {
    const auto place = by_storage_.find(storage_key(t));
    if (place == by_storage_.end()) return;
    const Known removed = std::move(place->second);
    by_storage_.erase(place);
  }

  size_t size() const { return std::max(by_storage_.size(), by_result_.size()); }

  // Drops storages that are gone, and with them the inputs that their recipes hold, and their graph nodes; now and then.
  void sweep() {
    if (size() <= sweep_at_) return;
    Storages storages;
    Results results;
    for (const auto& [key, entry] : by_storage_) {
      if (!entry->storage.expired()) storages.emplace(key, entry);
    }
    for (const auto& [key, entry] : by_result_) {
      if (!entry->storage.expired()) results.emplace(key, entry);
    }
    by_storage_.swap(storages);
    by_result_.swap(results);
    sweep_at_ = std::max<size_t>(256, 2 * size());
  }

  void clear() {
    Storages storages;
    Results results;
    by_storage_.swap(storages);
    by_result_.swap(results);
  }

  int visit(visitproc visit, void* arg) const {
    for (const auto& [key, entry] : by_storage_) Py_VISIT(entry->recipe.get());
    return 0;
  }

 private:
  using Storages = std::unordered_map<c10::StorageImpl*, Known>;
  using Results = std::unordered_map<Result, Known, ResultHash>;

  Storages by_storage_;
  Results by_result_;
  std::optional<at::ScalarType> dtype_;
  bool several_dtypes_ = false;
  size_t sweep_at_ = 256;

  template <class Map>
  static Known found(const Map& map, const typename Map::key_type& key) {
    const auto place = map.find(key);
    return place == map.end() ? nullptr : place->second;
  }

  template <class Map>
  static void put(Map& map, typename Map::key_type key, Known entry) {
    std::swap(map[std::move(key)], entry);
  }
};

}  // namespace ckpt::saved
