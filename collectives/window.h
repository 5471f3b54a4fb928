// Windows: memory of each rank that the others write and read without its help.
//
//   auto window = Window::allocate(*comm, bytes);                // every rank calls it
//   auto work = (*window)->put_signal(data, size, to, offset, 0, 1);  // bytes, then the signal
//   ... at the target ...
//   auto wait = (*window)->wait_signal(from, 0, 1);
//   absl::Status status = comm->wait(*wait);                     // and the bytes are there
//
// A Work is one of the communicator: its wait() and test() tell the end, and it counts among the
// 4,096 that may be open, detached ones too. CallOptions' `timeout`, `on_end`, `context` and
// `detached` apply.
//
// Order. Nothing is ordered but this: a signal is seen only when all bytes of every earlier put of
// the same origin to the same target, in any window of that communicator and with the same
// CallOptions::tag, are there. A put has ended when its bytes are there; flush() ends when all
// before it have, whatever their tag. So a get() sees what was put before if the put has ended, and
// what two ranks write to one place at a time is undefined.
//
// Words. put_add() adds to 8 bytes in a window of the target's, where put_signal() raises a counter
// beside it: there may be any number of words, each for all ranks, and their owner may read them
// without a call and set them back while no rank adds. The target adds when it makes progress, over
// shm too; the work of the origin has ended when the target has been told, which may be before.
//
// Progress. Over shm the origin moves the bytes; what has up to 4 KiB, a signal alone too, is there
// when the call that began it returns, unless an earlier put to that rank with that tag is under
// way. Over other providers the target has to make progress too: in a call, by progress(), or by
// its endpoint's background thread.
//
// Failure. What breaks the communicator ends all works of its windows, as it ends calls. A put,
// get or signal alone that fails, or whose timeout is over, ends alone, whatever its target does.
// What it should have written may be there or not, or come later; behind a failed put or signal
// every put, signal and flush to that rank fails too: make another window.
//
// Threads and life: any function from any thread. A window goes before its communicator, whose end,
// or reconfigure(), leaves it without use. Memory of a window must not be given back before the
// window is destroyed: a peer may write to it until then, also after a failure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "collectives/communicator.h"

namespace baton {

struct WindowOptions {
  // Counters that each rank has at each other one, for signals: equal at all ranks, 1 to
  // Window::kMostSignals. A target has ranks() times as many of its endpoint's million.
  // None only where there are words.
  uint32_t signals = 1;
  bool words = false;  // equal at all ranks: this window's memory can be named by put_add()
  BackingFile file;    // of create(): as of Worker::register_memory()
  Time timeout = Time::zero();  // until all ranks have made theirs; zero: the communicator's
};

// Rows that lie apart. Row i of `from.size()` lies from[i] * from_stride bytes behind where the put
// begins here, and goes to[i] * to_stride bytes behind its offset there; with an empty `to`, they
// go behind one another. The lists stay untouched until the work has ended.
struct WindowRows {
  absl::Span<const uint32_t> from, to;
  size_t row_bytes = 0, from_stride = 0, to_stride = 0;
};

class Window;

// The target of put_add(): 8 bytes at `offset` in `window` at the target, aligned to 8 there. In
// device memory the copy engines read and write the word: nothing else may write it meanwhile.
struct WindowWord {
  const Window& window;  // of the same communicator, made with `words`
  size_t offset = 0;
  uint64_t add = 1;  // any, modulo 2^64
  // False: it may be seen before what was put earlier, but never before this put's own bytes.
  bool behind_earlier_puts = true;
};

class Window {
 public:
  static constexpr uint32_t kMostSignals = 64;

  // Collective, and blocks. Every rank brings `bytes` of memory of its own, as many as it likes,
  // also none. Where one has no use for its arguments, or no room, all hear InvalidArgument or what
  // else it was, with that rank's name, and the communicator goes on. Ranks that call something
  // else, or with another number of signals, break it as any call that differs.
  static absl::StatusOr<std::unique_ptr<Window>> create(Communicator& comm, void* data,
                                                        size_t bytes, WindowOptions options = {});
  // The same with memory of Baton's, zeroed, until the window is destroyed: what view() shows to
  // ranks of this machine.
  static absl::StatusOr<std::unique_ptr<Window>> allocate(Communicator& comm, size_t bytes,
                                                          WindowOptions options = {});
  // Not collective: closes this rank's window, and blocks until no peer touches its memory, while
  // other groups of the endpoint go on. Works in flight end with Aborted; accesses by other ranks
  // fail from then on. So agree first, by a barrier for example. Where a process of this machine
  // stands still in the middle of a copy it gives up after shm.fence_ms, and the log says that the
  // memory is not to be used again before that process has ended; memory of allocate() is not.
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  std::byte* data() const;
  size_t bytes() const;          // of this rank
  size_t bytes(int rank) const;  // 0 where there is no such rank
  uint32_t signals() const;

  // InvalidArgument: the rank or slot does not exist, the bytes lie outside of that rank's memory,
  // or the increment is larger than a counter can be. Unavailable: the rank has left the group.
  // Local memory must stay untouched (get: unread) until the work has ended; memory from
  // allocate(), and in a window of this communicator, is neither copied nor registered for the
  // call.
  absl::StatusOr<Work> put(const void* from, size_t bytes, int to, size_t offset,
                           const CallOptions& options = {});
  // And then adds `add`, at least 1, to this rank's counter `slot` at `to`.
  absl::StatusOr<Work> put_signal(const void* from, size_t bytes, int to, size_t offset,
                                  uint32_t slot, uint64_t add, const CallOptions& options = {});
  // As put_signal(), for rows; `add` 0: no signal. InvalidArgument also: lists of two lengths.
  absl::StatusOr<Work> put_rows(const void* from, const WindowRows& rows, int to, size_t offset,
                                uint32_t slot, uint64_t add, const CallOptions& options = {});
  // And then adds to a word at `to`. FailedPrecondition: that window has no `words`, or its
  // memory there is of a device that cannot be copied to.
  absl::StatusOr<Work> put_add(const void* from, size_t bytes, int to, size_t offset,
                               const WindowWord& word, const CallOptions& options = {});
  absl::StatusOr<Work> get(void* out, size_t bytes, int from, size_t offset,
                           const CallOptions& options = {});
  absl::StatusOr<Work> signal(int to, uint32_t slot, uint64_t add, const CallOptions& options = {});
  // Ends when the counter `slot` of rank `from` here is at least `value`. Takes nothing away from
  // it: counters only rise, to 2^48 - 1 at most.
  absl::StatusOr<Work> wait_signal(int from, uint32_t slot, uint64_t value,
                                   const CallOptions& options = {});
  // Ends when all earlier puts, gets and signals of this rank to `to` (kAnyRank: to all) have, and
  // says whether they went well, detached ones too; of a get that failed the first flush says so.
  absl::StatusOr<Work> flush(int to = kAnyRank, const CallOptions& options = {});
  // The counter as it is now. Does not advance anything.
  absl::StatusOr<uint64_t> signal_value(int from, uint32_t slot) const;

  // That rank's memory, read in place, as long as the RemoteView is held and the rank keeps its
  // window. Unimplemented, with the reason: it cannot be mapped here, since it is reached by a
  // network or did not allocate() it. Unavailable: the connection is still coming up.
  absl::StatusOr<RemoteView> view(int rank) const;

 private:
  struct Made;
  friend class Experts;        // which is made in steps, too
  friend class SteppedWindow;  // of tests in virtual time, where nothing may block
  explicit Window(std::unique_ptr<Made> made);
  static absl::StatusOr<std::unique_ptr<Window>> make(Communicator& comm, void* data, size_t bytes,
                                                      bool allocate, const WindowOptions& options);
  // make() in two steps: `work` ends when all ranks have begun, and only then finish() is called.
  static absl::StatusOr<std::unique_ptr<Window>> begin(Communicator& comm, void* data, size_t bytes,
                                                       bool allocate, const WindowOptions& options,
                                                       Work& work);
  absl::Status finish();
  std::unique_ptr<Made> made_;
};

}  // namespace baton
