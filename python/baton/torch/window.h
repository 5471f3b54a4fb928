// torch's one-sided windows (Backend::new_window) over Baton's.
#pragma once

#include <torch/csrc/distributed/c10d/Window.hpp>

#include "work.h"

namespace baton::c10d_backend {

class BatonWindow : public ::c10d::Window {
 public:
  // Makes a work of the group, and what starts it.
  using Begin = std::function<WorkPtr(const char* title, milliseconds timeout, bool background,
                                      const std::function<void(const WorkPtr&)>& start)>;
  BatonWindow(std::shared_ptr<Comm> comm, int rank, Begin begin)
      : comm_(std::move(comm)), rank_(rank), begin_(std::move(begin)) {}
  ~BatonWindow() override { destroy(); }

  void tensor_register(const at::Tensor& tensor, bool owning) override {
    TORCH_CHECK(window_ == nullptr, "this window has a tensor: tensor_deregister() it first");
    TORCH_CHECK(tensor.device().is_cpu() && tensor.is_contiguous(),
                "backend baton: a window takes contiguous tensors of the CPU");
    baton_error error = BATON_ERROR_INIT;
    baton_comm* const comm = comm_->enter();
    int32_t result;
    {
      std::optional<pybind11::gil_scoped_release> released;
      if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
      char none = 0;  // what is empty has no address, and NULL would ask for memory of Baton's
      result = baton_window_create(comm, tensor.nbytes() > 0 ? tensor.data_ptr() : &none,
                                   tensor.nbytes(), 1, 0, &window_, &error);
    }
    comm_->leave();
    check(result, error.text);
    type_ = tensor.scalar_type();
    mine_ = owning ? tensor : at::Tensor();
    taken_.clear();
  }
  void tensor_deregister() override {
    if (window_ == nullptr) return;
    // No other rank puts anything here any more.
    begin_("baton:window", ::c10d::kUnsetTimeout, false, [](const WorkPtr& work) {
      baton_call call = BATON_CALL_INIT;
      call.kind = BATON_BARRIER;
      work->start(call);
    })->synchronize();
    destroy();
  }

  // Signals nothing, unlike NCCL's: signal() does, behind it.
  c10::intrusive_ptr<::c10d::Work> put(const at::Tensor& tensor, int64_t to, int64_t offset,
                                       bool async, const ::c10d::PutOptions& opts) override {
    TORCH_CHECK_VALUE(tensor.device().is_cpu() && tensor.scalar_type() == type_,
                      "backend baton: this window takes tensors of the CPU of ",
                      c10::toString(type_));
    const at::Tensor packed = tensor.contiguous();
    baton_access access = access_of(BATON_PUT, to);
    access.data = packed.data_ptr();
    access.bytes = packed.nbytes();
    access.offset = static_cast<uint64_t>(offset) * packed.element_size();
    return start(access, "baton:put", async, opts.timeout, packed);
  }
  c10::intrusive_ptr<::c10d::Work> signal(int64_t to, bool async,
                                          const ::c10d::SignalOptions& opts) override {
    baton_access access = access_of(BATON_SIGNAL, to);
    access.value = 1;
    return start(access, "baton:signal", async, opts.timeout);
  }
  // Each takes one signal, in turn.
  c10::intrusive_ptr<::c10d::Work> wait_signal(int64_t from, bool async,
                                               const ::c10d::WaitSignalOptions& opts) override {
    baton_access access = access_of(BATON_WAIT_SIGNAL, from);
    access.value = taken_[from] + 1;
    auto work = start(access, "baton:wait_signal", async, opts.timeout);
    ++taken_[from];
    return work;
  }

  at::Tensor map_remote_tensor(int64_t rank) override {
    TORCH_CHECK(window_ != nullptr, "this window has no tensor: tensor_register() one");
    if (rank == rank_ && mine_.defined()) return mine_;
    const void* data = nullptr;
    uint64_t bytes = 0;
    baton_error error = BATON_ERROR_INIT;
    const int32_t result =
        baton_window_view(window_, static_cast<int32_t>(rank), &data, &bytes, &error);
    check(result, error.text);
    return at::from_blob(const_cast<void*>(data),
                         {static_cast<int64_t>(bytes / c10::elementSize(type_))},
                         at::TensorOptions().dtype(type_));
  }
  ::c10d::WindowAttr get_attr(int64_t) override { return {}; }

 private:
  static baton_access access_of(int32_t kind, int64_t rank) {
    baton_access access = BATON_ACCESS_INIT;
    access.kind = kind;
    access.rank = static_cast<int32_t>(rank);
    return access;
  }
  c10::intrusive_ptr<::c10d::Work> start(baton_access access, const char* title, bool async,
                                         milliseconds timeout, const at::Tensor& kept = {}) {
    TORCH_CHECK(window_ != nullptr, "this window has no tensor: tensor_register() one");
    WorkPtr made = begin_(title, timeout, async, [&](const WorkPtr& work) {
      if (kept.defined()) work->keep(kept);
      access.timeout = std::chrono::nanoseconds(work->getTimeout()).count();
      work->start_by([&](baton_comm*, baton_work* number, baton_error* error) {
        return baton_window_start(window_, &access, number, error);
      });
    });
    if (!async) made->synchronize();
    return made;
  }
  void destroy() {
    baton_window_destroy(std::exchange(window_, nullptr));
    mine_ = at::Tensor();
  }

  const std::shared_ptr<Comm> comm_;
  const int rank_;
  const Begin begin_;
  baton_window* window_ = nullptr;
  at::ScalarType type_ = at::ScalarType::Undefined;
  at::Tensor mine_;
  std::map<int64_t, uint64_t> taken_;  // signals, by rank
};

}  // namespace baton::c10d_backend
