// The c10d backend "baton": torch's calls as calls of a communicator of libbaton.
//
// Compiled by _build.py when the first group is made, for the torch that is there. Communicators
// are made in Python (__init__.py), which this file calls for what is rare: split, reconfigure,
// monitored barrier, sparse sums.
#include <baton/collectives.h>
#include <pthread.h>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "calls.h"
#include "window.h"

namespace baton::c10d_backend {
namespace {

namespace py = pybind11;
using namespace ::c10d;  // NOLINT: a subclass of its classes

// Python's part of a backend. It is never freed: the interpreter may end first.
py::object& rare() {
  static auto* functions = new py::object;
  return *functions;
}

class BatonBackend : public CallMaker {
 public:
  BatonBackend(c10::intrusive_ptr<Store> store, int rank, int size,
               c10::intrusive_ptr<Options> options, bool ordered, bool tune)
      : CallMaker(rank, size),
        ordered(ordered),
        tune(tune),
        store_(std::move(store)),
        options_(std::move(options)) {
    init();
  }
  ~BatonBackend() override {
    if (comm_ != nullptr) comm_->close();
  }

  // From baton.torch.Options; the groups that Python makes of this one inherit them.
  const bool ordered, tune;

  std::string members;  // of its group, for Python, which makes others of them

  // Takes the communicator over: Python has made it.
  void adopt(uintptr_t comm, std::string of, int rank, int size) {
    if (comm_ != nullptr) comm_->close();
    members = std::move(of);
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    comm_ = std::make_shared<Comm>(reinterpret_cast<baton_comm*>(comm), hooks_);
    rank_ = rank;
    size_ = size;
  }
  uintptr_t address() {
    return comm_ == nullptr ? 0 : reinterpret_cast<uintptr_t>(comm_->entered());
  }

  const std::string getBackendName() const override { return "baton"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(milliseconds timeout) override { options_->timeout = timeout; }
  uint64_t getSequenceNumberForGroup() override { return sequence_.load(); }
  void setSequenceNumberForGroup() override {}

  // --- collectives -----------------------------------------------------------------------------
  c10::intrusive_ptr<Work> broadcast(Tensors& tensors, const BroadcastOptions& opts) override {
    at::Tensor& tensor = one(tensors, "broadcast");
    check_dense(tensor, "broadcast");
    check_root(opts.rootRank, "broadcast");
    auto work = begin(OpType::BROADCAST, "baton:broadcast", tensors, tensors, opts.timeout);
    const at::Tensor packed = tensor.contiguous();
    baton_call call = moving(BATON_BROADCAST, packed, work);
    call.in = call.out = packed.data_ptr();
    call.peer = static_cast<int32_t>(opts.rootRank);
    unpack(work, tensor, packed);
    return launch(work, opts.asyncOp, {call});
  }

  c10::intrusive_ptr<Work> allreduce(Tensors& tensors, const AllreduceOptions& opts) override {
    if (one(tensors, "all_reduce").is_sparse()) return allreduce_sparse(tensors, opts);
    return reduce_all(tensors[0], tensors, OpType::ALLREDUCE, opts);
  }
  c10::intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors,
                                               const AllreduceCoalescedOptions& opts) override {
    auto work =
        begin(OpType::ALLREDUCE_COALESCED, "baton:all_reduce", tensors, tensors, opts.timeout);
    std::vector<baton_call> calls;
    for (at::Tensor& tensor : tensors) calls.push_back(reducing_all(tensor, opts, work));
    return launch(work, opts.asyncOp, calls);
  }
  c10::intrusive_ptr<Work> allreduce_sparse(Tensors& tensors,
                                            const AllreduceOptions& opts) override {
    one(tensors, "all_reduce of sparse tensors");
    auto work =
        begin(OpType::_ALLREDUCE_SPARSE, "baton:all_reduce", tensors, tensors, opts.timeout);
    {
      const py::gil_scoped_acquire gil;
      rare().attr("all_reduce_sparse")(self(), tensors[0], opts.reduceOp);
    }
    return launch(work, opts.asyncOp, {});
  }

  c10::intrusive_ptr<Work> reduce(Tensors& tensors, const ReduceOptions& opts) override {
    at::Tensor& tensor = one(tensors, "reduce");
    check_dense(tensor, "reduce");
    check_root(opts.rootRank, "reduce");
    auto work = begin(OpType::REDUCE, "baton:reduce", tensors, tensors, opts.timeout);
    const Reduced how = reduced(tensor.scalar_type(), opts.reduceOp);
    const at::Tensor packed = tensor.to(how.as).contiguous();
    baton_call call = reducing(BATON_REDUCE, packed, how, work);
    call.in = packed.data_ptr();
    call.peer = static_cast<int32_t>(opts.rootRank);
    if (rank_ == opts.rootRank) {
      call.out = packed.data_ptr();
      unpack(work, tensor, packed);
    }
    return launch(work, opts.asyncOp, {call});
  }

  c10::intrusive_ptr<Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const AllgatherOptions& opts) override {
    TORCH_CHECK(outputs.size() == 1, "backend baton: all_gather takes one list of outputs, not ",
                outputs.size());
    at::Tensor& input = one(inputs, "all_gather");
    auto work = begin(OpType::ALLGATHER, "baton:all_gather", inputs, outputs[0], opts.timeout);
    return launch(work, opts.asyncOp, {gathering(outputs[0], input, work)});
  }
  c10::intrusive_ptr<Work> allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                               const AllgatherOptions& opts) override {
    Tensors all;
    for (const Tensors& list : outputs) {
      TORCH_CHECK_VALUE(list.size() == inputs.size(), "backend baton: all_gather got ",
                        inputs.size(), " inputs and ", list.size(), " outputs of a rank");
      all.insert(all.end(), list.begin(), list.end());
    }
    auto work = begin(OpType::ALLGATHER_COALESCED, "baton:all_gather", inputs, all, opts.timeout);
    std::vector<baton_call> calls;
    for (size_t i = 0; i < inputs.size(); ++i) {
      Tensors list;
      for (const Tensors& of_rank : outputs) list.push_back(of_rank[i]);
      calls.push_back(gathering(list, inputs[i], work));
    }
    return launch(work, opts.asyncOp, calls);
  }
  c10::intrusive_ptr<Work> all_gather_single(at::Tensor& output, at::Tensor& input,
                                             const AllgatherOptions& opts) override {
    auto work =
        begin(OpType::_ALLGATHER_BASE, "baton:all_gather_single", {input}, {output}, opts.timeout);
    return launch(work, opts.asyncOp, {gathering_single(output, input, work)});
  }
  c10::intrusive_ptr<Work> all_gather_single_coalesced(Tensors& outputs, Tensors& inputs,
                                                       const AllgatherOptions& opts) override {
    check_as_many(outputs, inputs, "all_gather_single_coalesced");
    auto work = begin(OpType::ALLGATHER_INTO_TENSOR_COALESCED, "baton:all_gather_single", inputs,
                      outputs, opts.timeout);
    std::vector<baton_call> calls;
    for (size_t i = 0; i < inputs.size(); ++i) {
      calls.push_back(gathering_single(outputs[i], inputs[i], work));
    }
    return launch(work, opts.asyncOp, calls);
  }

  c10::intrusive_ptr<Work> reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                          const ReduceScatterOptions& opts) override {
    at::Tensor& output = one(outputs, "reduce_scatter");
    TORCH_CHECK(inputs.size() == 1, "backend baton: reduce_scatter takes one list of inputs");
    check_parts(inputs[0], output, "reduce_scatter");
    auto work =
        begin(OpType::REDUCE_SCATTER, "baton:reduce_scatter", inputs[0], outputs, opts.timeout);
    const Row row(inputs[0], "reduce_scatter", output.scalar_type());
    row.fill();
    return launch(work, opts.asyncOp, {scattering(output, row.memory, opts, work)});
  }
  c10::intrusive_ptr<Work> reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                                                 const ReduceScatterOptions& opts) override {
    auto work = begin(OpType::_REDUCE_SCATTER_BASE, "baton:reduce_scatter_single", {input},
                      {output}, opts.timeout);
    return launch(work, opts.asyncOp, {scattering_single(output, input, opts, work)});
  }
  c10::intrusive_ptr<Work> reduce_scatter_single_coalesced(
      Tensors& outputs, Tensors& inputs, const ReduceScatterOptions& opts) override {
    check_as_many(outputs, inputs, "reduce_scatter_single_coalesced");
    auto work = begin(OpType::REDUCE_SCATTER_TENSOR_COALESCED, "baton:reduce_scatter_single",
                      inputs, outputs, opts.timeout);
    std::vector<baton_call> calls;
    for (size_t i = 0; i < inputs.size(); ++i) {
      calls.push_back(scattering_single(outputs[i], inputs[i], opts, work));
    }
    return launch(work, opts.asyncOp, calls);
  }

  c10::intrusive_ptr<Work> gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                  const GatherOptions& opts) override {
    at::Tensor& input = one(inputs, "gather");
    check_root(opts.rootRank, "gather");
    const bool root = rank_ == opts.rootRank;
    TORCH_CHECK(outputs.size() == (root ? 1 : 0), "backend baton: gather takes a list of outputs ",
                "at the root, and none elsewhere");
    check_dense(input, "gather");
    const Tensors list = root ? outputs[0] : Tensors{};
    auto work = begin(OpType::GATHER, "baton:gather", inputs, list, opts.timeout);
    const at::Tensor from = input.contiguous();
    baton_call call = moving(BATON_GATHER, from, work);
    call.in = from.const_data_ptr();
    call.peer = static_cast<int32_t>(opts.rootRank);
    if (root) call.out = receiving(list, input, "gather", work);
    return launch(work, opts.asyncOp, {call});
  }
  c10::intrusive_ptr<Work> gather_single(at::Tensor& output, at::Tensor& input,
                                         const GatherOptions& opts) override {
    std::vector<Tensors> outputs;
    if (rank_ == opts.rootRank) {
      check_times(output, input, "gather_single");
      outputs.push_back(output.view(-1).chunk(size_));
    }
    Tensors inputs{input.reshape(-1)};
    return gather(outputs, inputs, opts);
  }
  c10::intrusive_ptr<Work> scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                   const ScatterOptions& opts) override {
    at::Tensor& output = one(outputs, "scatter");
    check_root(opts.rootRank, "scatter");
    const bool root = rank_ == opts.rootRank;
    TORCH_CHECK(inputs.size() == (root ? 1 : 0), "backend baton: scatter takes a list of inputs ",
                "at the root, and none elsewhere");
    check_dense(output, "scatter");
    const Tensors list = root ? inputs[0] : Tensors{};
    auto work = begin(OpType::SCATTER, "baton:scatter", list, outputs, opts.timeout);
    const at::Tensor to = output.contiguous();
    baton_call call = moving(BATON_SCATTER, to, work);
    call.out = to.data_ptr();
    call.peer = static_cast<int32_t>(opts.rootRank);
    if (root) {
      check_parts(list, output, "scatter");
      const Row row(list, "scatter", output.scalar_type());
      row.fill();
      work->keep(row.memory);
      call.in = row.memory.const_data_ptr();
    }
    unpack(work, output, to);
    return launch(work, opts.asyncOp, {call});
  }

  c10::intrusive_ptr<Work> alltoall(Tensors& outputs, Tensors& inputs,
                                    const AllToAllOptions& opts) override {
    check_list(outputs, "all_to_all");
    check_list(inputs, "all_to_all");
    auto work = begin(OpType::ALLTOALL, "baton:all_to_all", inputs, outputs, opts.timeout);
    return launch(work, opts.asyncOp, {exchanging(outputs, inputs, "all_to_all", work)});
  }
  c10::intrusive_ptr<Work> all_to_all_single(at::Tensor& output, at::Tensor& input,
                                             std::vector<int64_t>& output_sizes,
                                             std::vector<int64_t>& input_sizes,
                                             const AllToAllOptions& opts) override {
    check_dense(output, "all_to_all_single");
    check_dense(input, "all_to_all_single");
    auto work =
        begin(OpType::ALLTOALL_BASE, "baton:all_to_all_single", {input}, {output}, opts.timeout);
    const at::Tensor to = output.contiguous();
    baton_call call{};
    if (output_sizes.empty() && input_sizes.empty()) {
      const at::Tensor from = input.contiguous();
      TORCH_CHECK(input.numel() == output.numel() && input.numel() % size_ == 0,
                  "backend baton: all_to_all_single wants as many elements in as out, a multiple ",
                  "of the ", size_, " ranks, and got ", input.numel(), " and ", output.numel());
      call = moving(BATON_ALL_TO_ALL, from, work);
      call.count /= size_;
      call.in = from.const_data_ptr();
      call.out = to.data_ptr();
    } else {
      checkSplitSizes(input_sizes, input, size_);
      checkSplitSizes(output_sizes, output, size_);
      call = exchanging(rows_of(to, output_sizes), rows_of(input.contiguous(), input_sizes),
                        "all_to_all_single", work);
    }
    unpack(work, output, to);
    return launch(work, opts.asyncOp, {call});
  }

  c10::intrusive_ptr<Work> barrier(const BarrierOptions& opts) override {
    auto work = begin(OpType::BARRIER, "baton:barrier", {}, {}, opts.timeout);
    baton_call call = BATON_CALL_INIT;
    call.kind = BATON_BARRIER;
    return launch(work, opts.asyncOp, {call});
  }
  void monitoredBarrier(const BarrierOptions& opts, bool all) override {
    const py::gil_scoped_acquire gil;
    rare().attr("monitored_barrier")(store_, rank_, size_, barriers_++, timeout_of(opts.timeout),
                                     all);
  }

  // --- point to point --------------------------------------------------------------------------
  c10::intrusive_ptr<Work> send(Tensors& tensors, int to, int tag) override {
    at::Tensor& tensor = one(tensors, "send");
    check_dense(tensor, "send");
    auto work = begin(OpType::SEND, "baton:send", tensors, {}, kUnsetTimeout);
    const at::Tensor packed = tensor.contiguous();
    baton_call call = moving(BATON_SEND, packed, work);
    call.in = packed.const_data_ptr();
    call.peer = to;
    call.tag = tag;
    return launch(work, true, {call});
  }
  c10::intrusive_ptr<Work> recv(Tensors& tensors, int from, int tag) override {
    return receive(one(tensors, "recv"), tensors, from, tag, OpType::RECV, "baton:recv");
  }
  c10::intrusive_ptr<Work> recvAnysource(Tensors& tensors, int tag) override {
    return receive(one(tensors, "recv"), tensors, BATON_ANY_RANK, tag, OpType::RECVANYSOURCE,
                   "baton:recvAnySource");
  }

  // --- the group ---------------------------------------------------------------------------------
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<Store>& store,
                                    const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& opts) override {
    const py::gil_scoped_acquire gil;
    const py::object part = rare().attr("split")(self(), store, ranks, opts);
    return part.is_none() ? nullptr : part.cast<c10::intrusive_ptr<Backend>>();
  }
  bool supportsReconfigure() const override { return true; }
  ReconfigureHandle get_reconfigure_handle() const override {
    const py::gil_scoped_acquire gil;
    return rare().attr("reconfigure_handle")().cast<std::string>();
  }
  c10::intrusive_ptr<Work> reconfigure(const ReconfigureOptions& opts) override {
    const auto timeout = opts.timeout.value_or(options_->timeout);
    std::vector<std::string> handles;
    const bool ordered = std::holds_alternative<std::vector<std::string>>(opts.handles);
    if (ordered) {
      handles = std::get<1>(opts.handles);
    } else {
      for (const std::string& handle : std::get<0>(opts.handles)) handles.push_back(handle);
      std::sort(handles.begin(), handles.end());
    }
    // Not without need: at other ranks a call may still be about to end well.
    if (comm_ != nullptr && comm_->uses() > 0) {
      end_calls("the process group is getting other members");
    }
    {
      const py::gil_scoped_acquire gil;
      rare().attr("reconfigure")(self(), options_->group_name, opts.uuid, handles, timeout);
    }
    auto work = begin(OpType::UNKNOWN, nullptr, {}, {}, timeout);
    return launch(work, false, {});
  }

  bool supportsWindow() const override { return true; }
  c10::intrusive_ptr<Window> new_window(const std::optional<at::Tensor>& tensor) override {
    TORCH_CHECK(comm_ != nullptr, "this process group has no members yet: call reconfigure()");
    const auto mine = c10::intrusive_ptr<BatonBackend>::unsafe_reclaim_from_nonowning(this);
    auto window = c10::make_intrusive<BatonWindow>(
        comm_, rank_,
        [mine](const char* title, milliseconds timeout, bool background,
               const std::function<void(const WorkPtr&)>& start) {
          auto work = mine->begin(OpType::UNKNOWN, title, {}, {}, timeout);
          Helper::get().make_room(*mine->comm_, *work);
          start(work);
          if (background) Helper::get().add(work);
          return work;
        });
    if (tensor.has_value()) window->tensor_register(*tensor, true);
    return window;
  }

  void abort() override {
    hooks_->failed();
    end_calls("the process group was aborted at this rank");
  }
  void shutdown() override {
    if (comm_ != nullptr) comm_->close();
  }
  ErrorType getError() override {
    if (comm_ == nullptr) return ErrorType::SUCCESS;
    const int32_t state = baton_comm_state(comm_->enter(), nullptr);
    comm_->leave();
    if (state >= 0) return ErrorType::SUCCESS;
    if (state == BATON_ERR_REMOTE_DISCONNECT) return ErrorType::REMOTE_ERROR;
    return state == BATON_ERR_TIMEOUT ? ErrorType::TIMEOUT : ErrorType::COMM_ERROR;
  }
  bool supportsAbortHooks() const override { return true; }
  void registerAbortHook(int64_t id, AbortHook hook) override { hooks_->add(id, std::move(hook)); }
  void unregisterAbortHook(int64_t id) override { hooks_->remove_abort(id); }
  bool supportsCompletionHooks() const override { return true; }
  void registerCompletionHook(int64_t id, CompletionHook hook) override {
    hooks_->add(id, std::move(hook));
  }
  void unregisterCompletionHook(int64_t id) override { hooks_->remove_completion(id); }

 private:
  py::object self() {
    return py::cast(c10::intrusive_ptr<Backend>::unsafe_reclaim_from_nonowning(this));
  }

  void end_calls(const char* why) {
    if (comm_ == nullptr) return;
    baton_comm* const comm = comm_->enter();
    baton_comm_abort(comm, why, nullptr);
    comm_->leave();
  }

  milliseconds timeout_of(milliseconds given) const {
    return given == kUnsetTimeout ? options_->timeout : given;
  }
  WorkPtr begin(OpType type, const char* title, const Tensors& inputs, const Tensors& outputs,
                milliseconds timeout) {
    TORCH_CHECK(comm_ != nullptr, "this process group has no members yet: call reconfigure()");
    return c10::make_intrusive<BatonWork>(comm_, type, title, inputs, outputs,
                                          sequence_.fetch_add(1) + 1, timeout_of(timeout));
  }

  c10::intrusive_ptr<Work> launch(const WorkPtr& work, bool background,
                                  c10::ArrayRef<baton_call> calls) {
    try {
      baton_stream after{};
      if (work->device.has_value()) after = stream_of(current_stream(*work->device));
      for (baton_call call : calls) {
        Helper::get().make_room(*comm_, *work);
        if (work->device.has_value()) call.after = &after;
        call.timeout = std::chrono::nanoseconds(work->getTimeout()).count();
        work->start(call);
      }
    } catch (...) {
      if (work->has_started()) Helper::get().add(work);  // it has the buffers of its calls
      throw;
    }
    // No thread waits for those of a device.
    if ((background || work->device.has_value()) && !calls.empty()) Helper::get().add(work);
    if (calls.empty()) work->poll();
    return work;
  }

  c10::intrusive_ptr<Work> reduce_all(const at::Tensor& tensor, const Tensors& tensors, OpType type,
                                      const AllreduceOptions& opts) {
    auto work = begin(type, "baton:all_reduce", tensors, tensors, opts.timeout);
    return launch(work, opts.asyncOp, {reducing_all(tensor, opts, work)});
  }

  c10::intrusive_ptr<Work> receive(const at::Tensor& tensor, const Tensors& tensors, int from,
                                   int tag, OpType type, const char* title) {
    check_dense(tensor, "recv");
    auto work = begin(type, title, {}, tensors, kUnsetTimeout);
    const at::Tensor packed = tensor.contiguous();
    baton_call call = moving(BATON_RECEIVE, packed, work);
    call.out = packed.data_ptr();
    call.peer = from;
    call.tag = tag;
    unpack(work, tensor, packed);
    return launch(work, true, {call});
  }

  const c10::intrusive_ptr<Store> store_;
  const c10::intrusive_ptr<Options> options_;
  const std::shared_ptr<Hooks> hooks_ = std::make_shared<Hooks>();
  std::shared_ptr<Comm> comm_;
  std::atomic<uint64_t> sequence_{0};
  uint64_t barriers_ = 0;
};

BatonBackend& ours(Backend& backend) {
  auto* const mine = dynamic_cast<BatonBackend*>(&backend);
  TORCH_CHECK(mine != nullptr, "this is no backend of Baton, but ", backend.getBackendName());
  return *mine;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  pthread_atfork(nullptr, nullptr, [] {
    Helper::forget();
    Callbacks::forget();
  });
  // torch calls this at ranks outside a new group, if the first group was given a device.
  py::class_<BatonBackend, Backend, c10::intrusive_ptr<BatonBackend>>(module, "Backend")
      .def("perform_nocolor_split", [](BatonBackend&, const py::object&) {});
  module.def("make", [](c10::intrusive_ptr<Store> store, int rank, int size,
                        c10::intrusive_ptr<Backend::Options> options, bool ordered, bool tune) {
    return c10::intrusive_ptr<Backend>(c10::make_intrusive<BatonBackend>(
        std::move(store), rank, size, std::move(options), ordered, tune));
  });
  module.def("settings", [](Backend& backend) {
    return std::make_pair(ours(backend).ordered, ours(backend).tune);
  });
  module.def("adopt", [](Backend& backend, uintptr_t comm, py::bytes members, int rank, int size) {
    ours(backend).adopt(comm, members, rank, size);
  });
  module.def("members", [](Backend& backend) {
    auto* const mine = dynamic_cast<BatonBackend*>(&backend);
    return py::bytes(mine == nullptr ? "" : mine->members);
  });
  module.def("address", [](Backend& backend) { return ours(backend).address(); });
  module.def("is_cuda", [](const std::string& type) {
    types_of_cuda().fetch_or(uint64_t{1} << static_cast<int>(c10::Device(type).type()));
  });
  module.def("does_rare_calls", [](py::object functions) { rare() = std::move(functions); });
  module.def("use", [](uintptr_t endpoint) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    Helper::get().use(reinterpret_cast<baton_endpoint*>(endpoint));
  });
  module.def(
      "stop", [] { Helper::get().stop(); }, py::call_guard<py::gil_scoped_release>());
}

}  // namespace
}  // namespace baton::c10d_backend
