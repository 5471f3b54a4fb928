// The fake's graphs: what is put on a stream while it is recorded runs at no call but a launch of
// the graph, each time anew, when its stream comes to it.
#include "tests/gpudirect/fake/entries.h"

namespace baton::gpudirect {

struct FakeGraphCalls {
  static Result begin(const FakeCall& call, Stream stream, int mode) {
    if (call.queue(stream) == nullptr) return kInvalidHandle;
    if (mode != kCaptureThreadLocal) {
      call.violate(Rule::kCapture, "other threads' calls would fail meanwhile");
    }
    if (call.fake.captures_.contains(stream)) {
      call.violate(Rule::kCapture, "it is being recorded already");
      return kInvalidValue;
    }
    call.fake.captures_[stream].thread = std::this_thread::get_id();
    return kSuccess;
  }

  static Result is_capturing(const FakeCall& call, Stream stream, int* status) {
    if (!FakeDriver::is_default(stream) && !call.fake.streams_.contains(stream)) {
      call.violate(Rule::kStale, "no such stream");
      return kInvalidHandle;
    }
    const auto found = call.fake.captures_.find(stream);
    const bool recorded = found != call.fake.captures_.end();
    *status = !recorded ? 0 : found->second.invalid ? 2 : 1;
    return kSuccess;
  }

  // Ends the recording whatever it answers.
  static Result end(const FakeCall& call, Stream stream, Graph* graph) {
    *graph = nullptr;
    const auto found = call.fake.captures_.find(stream);
    if (found == call.fake.captures_.end()) {
      if (call.refused() != kSuccess) return call.refused();
      call.violate(Rule::kCapture, "nobody records this stream");
      return kInvalidValue;
    }
    if (found->second.thread != std::this_thread::get_id()) {
      call.violate(Rule::kCapture, "another thread records this stream");
      return kInvalidValue;
    }
    const FakeDriver::Capture capture = std::move(found->second);
    call.fake.captures_.erase(found);
    if (call.refused() != kSuccess) return call.refused();
    if (capture.invalid) return kCaptureInvalidated;
    *graph = reinterpret_cast<Graph>(call.fake.next_object_++);
    call.fake.graphs_[*graph] = capture.operations;
    return kSuccess;
  }

  static Result instantiate(const FakeCall& call, GraphExecutable* executable, Graph graph,
                            unsigned long long flags) {
    const auto found = call.fake.graphs_.find(graph);
    if (found == call.fake.graphs_.end() || flags != 0) {
      call.violate(Rule::kCapture, "no such graph, or unknown flags");
      return kInvalidValue;
    }
    *executable = reinterpret_cast<GraphExecutable>(call.fake.next_object_++);
    call.fake.executables_[*executable] = found->second;
    call.fake.homes_[*executable] = FakeDriver::current_context();
    return kSuccess;
  }

  static Result launch(const FakeCall& call, GraphExecutable executable, Stream stream) {
    auto* const queue = call.queue(stream);
    const auto found = call.fake.executables_.find(executable);
    if (found == call.fake.executables_.end()) {
      call.violate(Rule::kCapture, "no such executable graph");
    }
    if (queue == nullptr || found == call.fake.executables_.end() || !call.at_home(executable)) {
      return kInvalidHandle;
    }
    for (const FakeDriver::Operation& operation : found->second) {
      queue->push_back(operation);
      queue->back().number = call.fake.next_operation_++;
      queue->back().graph = executable;
    }
    return kSuccess;
  }

  static Result destroy_executable(const FakeCall& call, GraphExecutable executable) {
    if (call.fake.executables_.erase(executable) == 0) {
      call.violate(Rule::kCapture, "no such executable graph");
      return kInvalidHandle;
    }
    for (const auto& [stream, queue] : call.fake.streams_) {
      for (const FakeDriver::Operation& operation : queue) {
        if (operation.graph != executable) continue;
        call.violate(Rule::kCapture, "a launch of it is still queued");
        return kSuccess;
      }
    }
    return kSuccess;
  }
  static Result destroy(const FakeCall& call, Graph graph) {
    if (call.fake.graphs_.erase(graph) != 0) return kSuccess;
    call.violate(Rule::kCapture, "no such graph");
    return kInvalidHandle;
  }
};

void add_fake_graph_calls(FakeEntries& out) {
  add_call<FakeGraphCalls::begin, "cuStreamBeginCapture", kContext>(out, 10010);
  add_call<FakeGraphCalls::end, "cuStreamEndCapture", kContext | kSaysItself>(out, 10000);
  add_call<FakeGraphCalls::is_capturing, "cuStreamIsCapturing", kContext>(out, 10000);
  add_call<FakeGraphCalls::instantiate, "cuGraphInstantiateWithFlags", kContext | kBlocks>(out,
                                                                                           11040);
  add_call<FakeGraphCalls::launch, "cuGraphLaunch", kContext>(out, 10000);
  add_call<FakeGraphCalls::destroy_executable, "cuGraphExecDestroy", kContext | kTakes>(out, 10000);
  add_call<FakeGraphCalls::destroy, "cuGraphDestroy", kContext | kTakes>(out, 10000);
}

}  // namespace baton::gpudirect
