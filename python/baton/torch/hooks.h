// Runs the program's callbacks and hooks on threads that do not advance calls.
#pragma once

#include <ATen/core/Tensor.h>
#include <baton/collectives.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/Hooks.hpp>
#include <vector>

namespace baton::c10d_backend {

// Runs what belongs to the program, on threads that advance nothing: it may wait for other calls.
class Callbacks {
 public:
  static Callbacks& get() {
    Callbacks* callbacks = instance().load();
    if (callbacks != nullptr) return *callbacks;
    auto* made = new Callbacks;  // never deleted: its threads may outlive static objects
    return *(instance().compare_exchange_strong(callbacks, made) ? made : callbacks);
  }
  // In a forked child: the threads are the parent's.
  static void forget() { instance().store(nullptr); }
  void run(std::function<void()> task) {
    std::lock_guard lock(mutex_);
    if (stop_) return;
    tasks_.push_back(std::move(task));
    if (idle_ >= tasks_.size()) return wakes_.notify_one();
    ++threads_;
    std::thread([this] { work(); }).detach();
  }
  // Before the interpreter ends. Waits for what runs.
  void stop() {
    std::unique_lock lock(mutex_);
    stop_ = true;
    wakes_.notify_all();
    ended_.wait(lock, [&] { return threads_ == 0; });
  }

  // Runs what belongs to the program, whose errors have no other way out.
  template <typename Do>
  static void guard(const char* what, Do&& action) {
    try {
      action();
    } catch (const std::exception& why) {
      TORCH_WARN("backend baton: ", what, " raised: ", why.what());
    } catch (...) {
      TORCH_WARN("backend baton: ", what, " raised something that is no std::exception");
    }
  }

 private:
  static std::atomic<Callbacks*>& instance() {
    static std::atomic<Callbacks*> instance{nullptr};
    return instance;
  }

  void work() {
    std::unique_lock lock(mutex_);
    while (idle_ == 0 || !tasks_.empty()) {  // one thread stays for the next task
      ++idle_;
      wakes_.wait(lock, [&] { return stop_ || !tasks_.empty(); });
      --idle_;
      if (tasks_.empty()) break;
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      guard("a callback", task);
      task = nullptr;  // outside the lock: what it holds may need the interpreter's
      lock.lock();
    }
    if (--threads_ == 0) ended_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable wakes_, ended_;
  std::deque<std::function<void()>> tasks_;
  size_t idle_ = 0, threads_ = 0;
  bool stop_ = false;
};

// The hooks of a group's users. The error of a failed call does not wait for them: torch's own hook
// writes a trace, which takes seconds.
class Hooks : public std::enable_shared_from_this<Hooks> {
 public:
  void add(int64_t id, ::c10d::AbortHook hook) { put(abort_, id, std::move(hook)); }
  void add(int64_t id, ::c10d::CompletionHook hook) {
    put(completion_, id, std::move(hook));
    any_.store(true);
  }
  void remove_abort(int64_t id) { put(abort_, id, {}); }
  void remove_completion(int64_t id) { put(completion_, id, {}); }

  void failed() {
    Map<::c10d::AbortHook> hooks = all(abort_);
    if (hooks.empty() || telling_.exchange(true)) return;
    Callbacks::get().run([self = shared_from_this(), hooks = std::move(hooks)] {
      for (const auto& [id, hook] : hooks) Callbacks::guard("an abort hook", *hook);
      self->telling_.store(false);
    });
  }
  void ended(uint64_t key) const {
    if (!any_.load()) return;
    for (const auto& [id, hook] : all(completion_)) {
      Callbacks::guard("a completion hook", [&, &call = *hook] {
        call({.completionKey = key, .duration_ms = std::nullopt});
      });
    }
  }

 private:
  // By pointer: to copy or delete a hook takes the interpreter's lock, not to be waited for here.
  template <typename Hook>
  using Map = std::map<int64_t, std::shared_ptr<Hook>>;
  template <typename Hook>
  void put(Map<Hook>& hooks, int64_t id, Hook hook) {
    auto one = hook ? std::make_shared<Hook>(std::move(hook)) : nullptr;
    std::lock_guard lock(mutex_);
    hooks[id].swap(one);
    if (hooks[id] == nullptr) hooks.erase(id);
  }
  template <typename Hook>
  Map<Hook> all(const Map<Hook>& hooks) const {
    std::lock_guard lock(mutex_);
    return hooks;
  }
  mutable std::mutex mutex_;
  Map<::c10d::AbortHook> abort_;
  Map<::c10d::CompletionHook> completion_;
  std::atomic<bool> any_{false};
  std::atomic<bool> telling_{false};
};

// Tensors of CUDA devices, by torch's own interface to devices: no header of CUDA's is needed.
//
// A call waits for the stream that is current when it begins (baton_call.after); wait() has the
// stream that is current then wait for the call, and blocks no thread. Baton touches no memory
// behind a call's end, until which the work has its tensors: no allocator needs to hear of it, but
// for those that torch itself copies from behind a wait.

// The types of devices whose memory and streams are those of CUDA's driver, a bit for each: CUDA,
// where torch is built with that, and what a test has in its place.
inline std::atomic<uint64_t>& types_of_cuda() {
  static std::atomic<uint64_t> types{0};
  return types;
}
inline bool is_of_cuda(c10::Device device) {
  return (types_of_cuda().load() >> static_cast<int>(device.type()) & 1) != 0;
}

// The device of a call's tensors; nullopt: all are on the CPU.
inline std::optional<c10::Device> device_of(const std::vector<at::Tensor>& inputs,
                                            const std::vector<at::Tensor>& outputs) {
  std::optional<c10::Device> found;
  for (const auto* list : {&inputs, &outputs}) {
    for (const at::Tensor& tensor : *list) {
      if (!tensor.defined()) continue;
      TORCH_CHECK(!found.has_value() || *found == tensor.device(),
                  "backend baton: a call got tensors on ", *found, " and on ", tensor.device());
      found = tensor.device();
    }
  }
  return found.has_value() && is_of_cuda(*found) ? found : std::nullopt;
}

inline c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}
inline baton_stream stream_of(const c10::Stream& stream) {
  const c10::impl::VirtualGuardImpl guard(stream.device_type());
  return {stream.device_index(), guard.getStreamNativeHandle(stream)};
}

}  // namespace baton::c10d_backend
