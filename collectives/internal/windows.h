// The windows of a communicator: memory of each rank, and the accesses under way.
//
// An access is a transfer of the worker. A signal raises a counter at its target; it goes with the
// bytes of its put where no earlier put to that rank is under way, else alone, when those before it
// were acknowledged. That is the whole of the order that window.h promises. A word is added to by
// its owner, for a message (kAdd) that goes as the increment of a counter does.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "collectives/internal/call_table.h"
#include "collectives/internal/failure_detector.h"
#include "collectives/internal/mesh.h"
#include "collectives/internal/window_copies.h"
#include "collectives/window.h"

namespace baton::collectives::internal {

// Everything under the endpoint's lock.
class Windows {
 public:
  // All outlive it.
  struct Needs {
    const CommunicatorOptions& options;
    Mesh& mesh;
    CallTable& calls;
    FailureDetector& failure;
  };

  // A window of this rank, and what it knows of the others'.
  struct Entry {
    struct Peer {
      uint64_t bytes = 0, offset = 0;  // of its memory in `region`
      uint32_t window = 0;             // its number for it
      bool words = false;              // it takes kAdd
      RemoteRegion region;
      std::vector<RemoteCounter> theirs;  // our signals' there
      std::vector<uint64_t> added;        // to them; of this rank itself: what they are
      std::vector<CounterId> ours;        // its signals' here; of this rank itself: none
      absl::Status failed;      // OK, or how the first put or signal that failed has ended
      absl::Status failed_get;  // likewise, since a flush said so
    };
    Windows* owner = nullptr;  // null: the window is closed
    absl::Status closed;       // why it is, or is being closed
    Time close_by{};           // then its accesses are made to let go of memory
    std::byte* data = nullptr;
    uint64_t bytes = 0;
    uint32_t signals = 0;
    bool words = false;
    BackingFile file;      // behind memory of the caller's
    uint32_t number = 0;   // among the communicator's
    CommBuffer allocated;  // data null: the memory is the caller's
    MemoryRegion region;   // generation 0: it lies in the endpoint's memory, and peers have a grant
    RemoteRegion shown;    // to peers
    uint64_t offset = 0;   // in it
    std::vector<Peer> peers;
  };
  struct Access {
    enum class Kind : uint8_t { kPut, kGet, kSignal, kWait, kFlush };
    Kind kind = Kind::kPut;
    std::byte* local = nullptr;
    size_t bytes = 0;
    int rank = 0;  // kAnyRank: of a flush
    size_t offset = 0;
    uint32_t slot = 0;
    uint64_t value = 0;  // of a put: 0 for no signal
    WindowRows rows;     // of a put; no rows: its bytes lie in one run

    size_t reach() const;         // bytes from `local` to the end of what is touched here
    size_t remote_reach() const;  // and from `offset` there
    // `base`: of where they begin, in their regions.
    Layout local_layout(size_t base) const;
    Layout remote_layout(size_t base) const;
    // For a put that adds to a word; `words` is used by start() only.
    Entry* words = nullptr;
    size_t word_offset = 0;
    bool adds = false, behind_puts = true;
  };

  explicit Windows(const Needs& needs) : needs_(needs) {}
  Windows(const Windows&) = delete;
  Windows& operator=(const Windows&) = delete;

  // Makes this rank's part: its memory known, and its counters.
  absl::Status open(Entry& entry, void* data, size_t bytes, bool allocate);
  // The message about the window to rank `to`, and the one from rank `from`. `why`: the result of
  // open().
  static size_t invitation_bytes(uint32_t signals);
  void invite(const Entry& entry, uint32_t to, const absl::Status& why, std::byte* out) const;
  absl::Status accept(Entry& entry, uint32_t from, const std::byte* invitation);
  // Ends its accesses; no byte of its memory, nor of theirs here, moves when this returns true.
  // False: again, and let go of the lock before, for one of another process may be stopped.
  bool close(Entry& entry, const absl::Status& why);
  // All of them, before the group is left. Then nothing is under way.
  bool close_all(const absl::Status& why);
  static void pause_closing();  // without the lock

  absl::StatusOr<Work> start(const std::shared_ptr<Entry>& entry, const Access& access,
                             const CallOptions& options);
  absl::StatusOr<uint64_t> signal_value(const Entry& entry, int from, uint32_t slot) const;
  absl::StatusOr<RemoteView> view(const Entry& entry, int rank) const;

  // The body of kAdd; an error for one that no rank of ours would send.
  absl::Status on_add(std::string_view body);

  // Advances what is under way; false: nothing happened.
  bool advance() {
    const bool copies = copies_.advance();
    return (!ops_.empty() && advance_open()) || copies;
  }
  // The worker has to advance: for accesses that are under way, or for kAdd, which may come.
  bool needs_worker() const { return transfers_ > 0 || with_words_ > 0; }
  bool under_way() const { return transfers_ > 0; }
  bool any() const { return !entries_.empty() || !ops_.empty(); }
  // Whether what start() began wants a turn. One that was over at once does now and then: without
  // any it would not be noticed that the target is gone.
  bool wants_turn() { return !ops_.empty() || ++at_once_ % kTurnEvery == 0; }
  // As the same of Mesh, for the accesses to one rank.
  void cancel();
  bool sources_free(uint32_t rank) const;
  void withdraw(uint32_t rank);

 private:
  using Kind = Access::Kind;
  static constexpr uint32_t kTurnEvery = 64;
  // The puts and signals to one rank with one tag, while some are open or one has failed.
  struct Way {
    uint64_t key = 0;  // in ways_
    size_t open = 0;
    uint64_t unlanded_in = 0;  // the advance_open() in which a put of it was found under way
    absl::Status failed;       // OK, or how the first put of it that failed has ended
  };
  // An access that has not ended. Its transfer's end is told on whatever thread drives the worker.
  struct Running {
    // The end of its transfer. kLeft: the window was closed meanwhile, and the transfer's end
    // deletes this.
    enum class Fate : uint8_t { kUnderWay, kLanded, kLeft };
    std::shared_ptr<Entry> entry;
    Access access;
    Way* way = nullptr;  // null: of a get, a wait or a flush
    Work work;
    Time deadline{};
    bool moved = false;      // a put's or a get's bytes are there
    bool signalled = false;  // or there is nothing to signal
    bool transfer = false;   // one is under way
    bool given_up = false;   // its work has ended
    std::atomic<Fate> fate{Fate::kUnderWay};
    absl::Status result;  // of the transfer, before it is kLanded
    TransferId id;
    const Entry* local = nullptr;  // the window that its local memory lies in
    MemoryRegion registered;       // for this access
    Block copied;                  // what stands for its local memory; data null: nothing

    bool landed() const { return fate.load(std::memory_order_acquire) == Fate::kLanded; }
  };

  bool advance_open();
  static void on_end(void* context, TransferId id, const absl::Status& status);
  absl::Status check(const Entry& entry, const Access& access) const;
  absl::Status check_slot(const Entry& entry, const Access& access) const;
  absl::Status check_word(const Access& access) const;
  std::string label(int rank) const;
  std::string name(const Access& access) const;
  absl::Status about(const Access& access, const absl::Status& why) const;
  bool over_at_once(Entry& entry, const Access& access, uint64_t way);
  static bool on_device(const Entry& entry) {
    return entry.region.place.kind == MemoryKind::kDevice;
  }
  absl::Status access_own(Entry& entry, const Access& access);
  static void added_on_device(void* context, const absl::Status& status);
  bool takes_words(const Entry& entry) const;
  absl::Status failed_before(const Running& op) const;
  bool may_signal(const Running& op) const;  // while ops_ is gone through
  bool step(Running& op);
  bool step_waiting(Running& op);
  bool submit(Running& op);
  absl::Status choose_local(Running& op, TransferRequest& request);
  void fail(Running& op, const absl::Status& why);
  void end(Running& op, const absl::Status& result);
  void release(Running& op);
  bool has_left(int rank) const;
  uint64_t value(const Entry& entry, int from, uint32_t slot) const;
  bool holds(const Running& op) const;
  bool let_go(const Entry& of);
  static bool closing(const Running& op) {
    return !op.entry->closed.ok() || (op.local != nullptr && !op.local->closed.ok());
  }
  void leave_way(Running& op);
  static void leave(std::unique_ptr<Running> op);

  const Needs needs_;
  std::vector<Entry*> entries_;  // by number
  uint32_t next_number_ = 1;
  size_t with_words_ = 0;                        // of entries_
  std::vector<std::unique_ptr<Running>> ops_;    // open, in the order in which they were started
  std::vector<std::unique_ptr<Running>> spare_;  // their memory is reused
  absl::flat_hash_map<uint64_t, std::unique_ptr<Way>> ways_;  // by rank and tag
  uint64_t round_ = 0;                                        // of advance_open()
  uint32_t at_once_ = 0;                                      // turns that were not wanted
  std::vector<bool> open_;  // by rank, while ops_ is gone through: an earlier access is open
  bool any_open_ = false;
  Time now_{};  // likewise
  size_t transfers_ = 0;
  WindowCopies copies_;
};

}  // namespace baton::collectives::internal
