// Calls in flight: torch's Work over Baton's, and the thread that advances what nothing waits for.
#pragma once

#include <baton/collectives.h>
#include <unistd.h>

#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "device.h"
#include "hooks.h"

namespace baton::c10d_backend {

using std::chrono::milliseconds;

// Throws what torch's users expect for this result; returns if it is BATON_OK.
inline void check(int32_t result, const std::string& text) {
  if (result == BATON_OK) return;
  if (result == BATON_ERR_INVALID_PARAM) TORCH_CHECK_VALUE(false, text);
  if (result == BATON_ERR_REMOTE_DISCONNECT) {  // in the words of Gloo, which programs look for
    TORCH_CHECK_WITH(DistBackendError, false, "Connection closed by peer: ", text);
  }
  TORCH_CHECK_WITH(DistBackendError, false, text);
}

// A communicator, which ends when its group has left it and no call is in flight any more.
class Comm {
 public:
  Comm(baton_comm* comm, std::shared_ptr<Hooks> hooks) : hooks(std::move(hooks)), comm_(comm) {}
  ~Comm() { close(); }
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  // Each call in flight has entered.
  baton_comm* enter() {
    uses_.fetch_add(1);
    if (closed_.load()) {
      leave();
      TORCH_CHECK_WITH(DistBackendError, false,
                       "this process group was destroyed: init_process_group() or new_group() "
                       "makes another one");
    }
    return comm_.load();
  }
  void leave() {
    // Closed and unused at once: since it was closed, enter() gives it to no other thread.
    if (uses_.fetch_sub(1) == 1 && closed_.load() && uses_.load() == 0) destroy();
  }
  void close() {
    closed_.store(true);
    if (uses_.load() == 0) destroy();
  }
  baton_comm* entered() const { return comm_.load(); }
  int uses() const { return uses_.load(); }

  const std::shared_ptr<Hooks> hooks;
  std::atomic<int> waiting{0};      // threads that advance this communicator by waiting
  std::atomic<int> collectives{0};  // calls in flight that all ranks make

 private:
  void destroy() { baton_comm_destroy(comm_.exchange(nullptr)); }

  std::atomic<baton_comm*> comm_;
  std::atomic<int> uses_{0};
  std::atomic<bool> closed_{false};
};

class BatonWork;
using WorkPtr = c10::intrusive_ptr<BatonWork>;

class BatonWork : public ::c10d::Work {
 public:
  BatonWork(std::shared_ptr<Comm> comm, ::c10d::OpType type, const char* title,
            const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> outputs,
            uint64_t sequence, milliseconds timeout)
      : Work(-1, type, title, inputs),
        device(device_of(inputs, outputs)),
        comm_(std::move(comm)),
        outputs_(std::move(outputs)),
        collective_(type != ::c10d::OpType::SEND && type != ::c10d::OpType::RECV &&
                    type != ::c10d::OpType::RECVANYSOURCE),
        sequence_(sequence),
        timeout_(timeout) {}

  const std::optional<c10::Device> device;  // of its tensors; nullopt: the CPU

  // --- while it is made ---------------------------------------------------------------------
  void start(const baton_call& call) {
    start_by([&](baton_comm* comm, baton_work* work, baton_error* error) {
      return baton_comm_start(comm, &call, work, error);
    });
  }
  template <typename Begin>
  void start_by(Begin&& begin) {
    baton_comm* const comm = comm_->enter();
    baton_work work = 0;
    baton_error error = BATON_ERROR_INIT;
    const int32_t result = begin(comm, &work, &error);
    if (result != BATON_OK) {
      comm_->leave();
      if (result != BATON_ERR_INVALID_PARAM) comm_->hooks->failed();
      check(result, error.text);
    }
    if (collective_) comm_->collectives.fetch_add(1);
    numbers_.push_back(work);
  }
  void keep(at::Tensor tensor) { kept_.push_back(std::move(tensor)); }
  // What is to be done with the output once it is there.
  void then(std::function<void()> unpack) { unpack_.push_back(std::move(unpack)); }
  bool has_started() const { return !numbers_.empty(); }

  // --- torch's -------------------------------------------------------------------------------
  bool wait(milliseconds timeout) override {
    if (device.has_value()) {
      order(current_stream(*device));
    } else if (!is_over()) {
      try {
        reap(timeout);
      } catch (...) {  // the call goes on, whatever becomes of this work
        helped();
        throw;
      }
    }
    if (is_over() && failed_) std::rethrow_exception(exception_);
    return true;
  }
  bool isCompleted() override { return poll(); }
  bool isSuccess() const override { return is_over() && !failed_; }
  int sourceRank() const override { return source_; }
  std::vector<at::Tensor> result() override { return outputs_; }
  void synchronize() override {
    std::optional<pybind11::gil_scoped_release> released;
    if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
    wait(kNoTimeout);
  }
  void abort() override {
    TORCH_CHECK(false, "one call of a group cannot be aborted: abort the group");
  }
  uint64_t getSequencenumber() const override { return sequence_; }
  milliseconds getTimeout() const override { return timeout_; }
  uint64_t getCompletionKey() const override { return key_; }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (device.has_value()) return device_future();
    std::lock_guard lock(future_mutex_);
    if (future_ == nullptr) {
      has_future_.store(true);
      future_ =
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
      if (is_over()) complete(*future_);
    }
    return future_;
  }

  // --- for the helper ------------------------------------------------------------------------
  bool is_over() const { return over_.load(std::memory_order_acquire); }
  bool is_waited_for() const { return comm_->waiting.load() > 0; }
  bool has_future() const { return has_future_.load(); }
  bool is_collective() const { return collective_; }
  std::atomic<bool> has_helper{false};
  const Comm& comm() const { return *comm_; }
  // Advances without waiting, unless another thread does. True once it is over.
  bool poll() {
    if (is_over()) return true;
    std::unique_lock lock(reaping_, std::try_to_lock);
    if (!lock) return is_over();
    if (!tell_ended()) return false;
    settle(false);
    return true;
  }
  // Takes the ends of its calls so far. False: one is still in flight.
  bool tell_ended() {
    baton_error error = BATON_ERROR_INIT;
    for (; next_ < numbers_.size(); told(error)) {
      error.result = baton_work_test(comm_->entered(), numbers_[next_], &error);
      if (error.result == BATON_IN_PROGRESS) return false;
    }
    return true;
  }

 private:
  void reap(milliseconds timeout) {
    using Clock = std::chrono::steady_clock;
    constexpr milliseconds kSlice{100};  // between two looks at Ctrl-C
    const bool forever = timeout <= milliseconds::zero();
    const auto end = Clock::now() + (forever ? kSlice : timeout);
    const auto slice = [&]() -> std::chrono::nanoseconds {
      if (forever) return kSlice;
      return std::clamp<std::chrono::nanoseconds>(end - Clock::now(), milliseconds::zero(), kSlice);
    };
    const auto look_up = [&] {
      if (!forever && Clock::now() >= end) throw_late(timeout);
      if (getpid() != gettid() || Py_IsInitialized() == 0) return;
      const pybind11::gil_scoped_acquire gil;  // signals are told in the main thread
      if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
    };
    std::unique_lock lock(reaping_, std::defer_lock);
    while (!lock.try_lock_for(slice())) look_up();
    baton_error error = BATON_ERROR_INIT;
    while (next_ < numbers_.size()) {
      comm_->waiting.fetch_add(1);
      error.result = baton_work_wait(comm_->entered(), numbers_[next_], slice().count(), &error);
      comm_->waiting.fetch_sub(1);
      error.result == BATON_ERR_TIMEOUT ? look_up() : told(error);
    }
    settle(true);
  }
  void helped();  // by the helper

  [[noreturn]] static void throw_late(milliseconds timeout) {
    TORCH_CHECK_WITH(
        DistBackendError, false, "wait() Timed out after ", timeout.count(),
        " ms; the call goes on until its own timeout: wait() again, or abort the group");
  }

  // The end of the next call was told.
  void told(const baton_error& error) {
    if (error.result == BATON_OK && opType_ == ::c10d::OpType::RECVANYSOURCE) {
      baton_work_source(comm_->entered(), numbers_[next_], &source_, nullptr);
    }
    ++next_;
    if (collective_) comm_->collectives.fetch_sub(1);
    comm_->leave();
    if (error.result == BATON_OK || why_ != nullptr) return;
    try {
      check(error.result,
            c10::str(error.text, ". The call's timeout was ", timeout_.count(), " ms"));
    } catch (...) {
      why_ = std::current_exception();
    }
  }

  // All calls have ended: the output gets its shape, and waiting threads are told.
  void settle(bool by_caller) {
    if (is_over()) return;
    if (why_ != nullptr) {
      comm_->hooks->failed();
    } else {
      try {
        if (!device.has_value()) unpack();
        comm_->hooks->ended(key_);
      } catch (...) {
        why_ = std::current_exception();
      }
    }
    if (why_ != nullptr) unpack_.clear();
    if (unpack_.empty()) kept_.clear();  // else order() has a use for them
    failed_ = why_ != nullptr;
    finish(why_);
    over_.store(true, std::memory_order_release);
    c10::intrusive_ptr<c10::ivalue::Future> future;
    {
      std::lock_guard lock(future_mutex_);
      future = future_;
    }
    if (future == nullptr) return;
    if (by_caller) {
      complete(*future);
    } else {
      Callbacks::get().run(
          [self = WorkPtr::reclaim_copy(this), future] { self->complete(*future); });
    }
  }

  void unpack() {
    const c10::InferenceMode any_tensor;  // also those that a program made in that mode
    for (const auto& one : std::exchange(unpack_, {})) one();
  }

  // Has a stream of the device wait for the calls, and put their output where it belongs, once.
  void order(const c10::Stream& stream) {
    std::optional<pybind11::gil_scoped_release> released;
    if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
    std::unique_lock lock(reaping_);
    baton_error error = BATON_ERROR_INIT;
    const baton_stream theirs = stream_of(stream);
    for (size_t i = next_; i < numbers_.size(); ++i) {
      if (baton_work_hold(comm_->entered(), numbers_[i], &theirs, &error) == BATON_OK) continue;
      // It has failed, which is told below; or the stream cannot wait, so this thread does.
      if (!tell_ended()) {
        lock.unlock();
        reap(kNoTimeout);
        lock.lock();
      }
      break;
    }
    if (next_ == numbers_.size()) settle(false);
    if (is_over() && failed_) return;
    if (unpacked_.has_value()) return unpacked_->block(stream);
    if (unpack_.empty()) return;
    const c10::StreamGuard guard(stream);
    unpack();
    const c10::impl::VirtualGuardImpl streams(device->type());
    for (const at::Tensor& tensor : kept_) {
      streams.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
    }
    unpacked_.emplace(device->type());
    unpacked_->record(stream);
    if (is_over()) kept_.clear();
  }

  // It is complete at once: whoever waits for it has a stream wait for the one that is held here.
  c10::intrusive_ptr<c10::ivalue::Future> device_future() {
    const c10::Stream side =
        c10::impl::VirtualGuardImpl(device->type()).getStreamFromGlobalPool(*device);
    order(side);
    std::lock_guard lock(future_mutex_);
    if (future_ == nullptr) {
      future_ = c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{*device});
      const c10::StreamGuard guard(side);
      complete(*future_);
    }
    return future_;
  }

  void complete(c10::ivalue::Future& future) {
    if (future.completed()) return;
    is_over() && failed_ ? future.setError(why_) : future.markCompleted(c10::IValue(outputs_));
  }

  static uint64_t next_key() {
    static std::atomic<uint64_t> last{0};
    return ++last;
  }

  const std::shared_ptr<Comm> comm_;
  c10::SmallVector<baton_work, 1> numbers_;
  size_t next_ = 0;  // of them to be told
  c10::SmallVector<at::Tensor, 2> kept_;
  std::vector<at::Tensor> outputs_;
  c10::SmallVector<std::function<void()>, 1> unpack_;
  std::optional<c10::Event> unpacked_;  // of a device, on the stream that did it
  const bool collective_;
  const uint64_t sequence_;
  const uint64_t key_ = next_key();
  const milliseconds timeout_;
  int32_t source_ = -1;
  std::exception_ptr why_;
  bool failed_ = false;  // read once it is over
  std::atomic<bool> over_{false}, has_future_{false};
  std::timed_mutex reaping_;  // of the thread that advances this work
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Advances works that nothing waits for, so that futures end, and peers go on, while the program
// computes. One thread for the process, begun with the first such work.
class Helper {
 public:
  static Helper& get() {
    Helper* helper = instance().load();
    if (helper != nullptr) return *helper;
    auto* made = new Helper;  // never deleted: its thread may outlive static objects
    return *(instance().compare_exchange_strong(helper, made) ? made : helper);
  }
  // In a forked child: the thread is the parent's.
  static void forget() { instance().store(nullptr); }

  void add(WorkPtr work) {
    if (work->has_helper.exchange(true)) return;
    std::lock_guard lock(mutex_);
    works_.push_back(std::move(work));
    if (!thread_.joinable() && !stop_) thread_ = std::thread([this] { run(); });
    if (asleep_) wakes_.notify_one();
  }

  // The state that all communicators of the process share, until stop().
  void use(baton_endpoint* endpoint) { endpoint_.store(endpoint); }

  // Before the interpreter ends: no callback runs afterwards.
  void stop() {
    std::thread thread;
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
      wakes_.notify_one();
      thread = std::move(thread_);
    }
    if (thread.joinable()) thread.join();
    Callbacks::get().stop();
  }

  // Until the library, which has 256 for collectives and 4,096 in all, has room for another call of
  // this communicator. `making`: the work that wants it, whose own calls may fill it.
  void make_room(const Comm& comm, BatonWork& making) {
    constexpr int kMost = 4000, kMostCollectives = 200;
    while (comm.uses() >= kMost ||
           (making.is_collective() && comm.collectives >= kMostCollectives)) {
      making.tell_ended();
      std::vector<WorkPtr> mine;
      {
        std::lock_guard lock(mutex_);
        for (const WorkPtr& work : works_) {
          if (&work->comm() == &comm) mine.push_back(work);
        }
      }
      bool any = false;
      for (const WorkPtr& work : mine) any |= work->poll();
      if (!any) std::this_thread::yield();
    }
  }

 private:
  static std::atomic<Helper*>& instance() {
    static std::atomic<Helper*> instance{nullptr};
    return instance;
  }

  void run() {
    // Most calls are over, by the caller that waits, before this thread has looked.
    constexpr auto kGrace = std::chrono::microseconds(50);
    constexpr auto kLongest = std::chrono::microseconds(400);
    constexpr int kTurns = 200;  // of progress, between two looks at the works
    auto nap = kGrace;
    std::vector<WorkPtr> works;  // ours to look at, outside the lock
    std::unique_lock lock(mutex_);
    while (!stop_) {
      if (works_.empty()) {
        asleep_ = true;
        wakes_.wait(lock);
        asleep_ = false;
        nap = kGrace;
        continue;
      }
      works = works_;
      lock.unlock();
      std::this_thread::sleep_for(nap);
      const bool alone = std::none_of(works.begin(), works.end(), [](const WorkPtr& work) {
        return work->is_waited_for();  // and so all are advanced
      });
      for (int turn = 0; alone && turn < kTurns; ++turn) {
        if (baton_endpoint_progress(endpoint_.load()) != 1) break;
      }
      size_t over = 0;
      for (WorkPtr& work : works) {
        // A future's callback may be what the waiting thread's call needs at another rank.
        const bool ours = work->has_future() || !work->is_waited_for();
        if (work->is_over() || (ours && work->poll())) {
          ++over;
        } else {
          work.reset();
        }
      }
      lock.lock();
      std::erase_if(works_, [&](const WorkPtr& work) {
        return std::find(works.begin(), works.end(), work) != works.end();
      });
      lock.unlock();
      works.clear();  // outside the lock: what they hold may need the interpreter's
      lock.lock();
      nap = over > 0 ? kGrace : std::min(nap * 3 / 2, kLongest);
    }
  }

  std::mutex mutex_;
  std::condition_variable wakes_;
  std::vector<WorkPtr> works_;
  bool asleep_ = false;
  bool stop_ = false;
  std::atomic<baton_endpoint*> endpoint_{nullptr};
  std::thread thread_;
};

inline void BatonWork::helped() { Helper::get().add(WorkPtr::reclaim_copy(this)); }

}  // namespace baton::c10d_backend
