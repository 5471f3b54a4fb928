// The inside of a communicator. Everything here runs under `mutex`, except what is said otherwise.
// Split by subject: communicator.cc (the public calls), mesh.cc (meeting, links), calls.cc and
// point_to_point.cc (starting and ending calls), trials.cc (which way a call is run), calibrate.cc,
// waiting.cc (driving, sleeping, the background thread), failure.cc (what goes wrong and who is
// told), shrink.cc.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "collectives/communicator.h"
#include "collectives/control_block.h"
#include "collectives/cost_model.h"
#include "collectives/direct_link.h"
#include "collectives/executor.h"
#include "collectives/flight_recorder.h"
#include "collectives/memory.h"
#include "collectives/rendezvous.h"
#include "collectives/transfer_link.h"

namespace baton {

namespace collectives {

// What ranks tell each other besides data: the first byte of a notification.
enum class Mail : char {
  kWake = 'w',      // look at your links
  kCall = 'c',      // CallDescriptor: what I called
  kView = 'v',      // one byte: whether I can map your memory
  kOffer = 'o',     // TransferLink::Offer
  kBye = 'b',       // I leave, in order
  kAbort = 'x',     // Verdict: it is over, and why
  kQuery = 'q',     // Standing of mine: tell me yours
  kStanding = 's',  // Standing: an answer
  kShrink = 'k',    // Ballot, see shrink.cc
};

// Where a rank stands, told when calls take too long.
struct Standing {
  CallDescriptor call;   // the one that stands still; sequence 0: none
  uint64_t entered = 0;  // sequence of the last call
  uint32_t waits_for = UINT32_MAX;
};

}  // namespace collectives

class Communicator::Impl {
 public:
  static constexpr size_t kSlots = 256;

  explicit Impl(CommunicatorOptions communicator_options);
  ~Impl();

  // A call in flight, and what the caller will hear of it.
  struct WorkSlot {
    collectives::Call call;
    std::atomic<uint64_t> id{0};  // Work::sequence; 0: free
    std::atomic<bool> done{false};
    absl::Status result;
    Impl* owner = nullptr;
    WorkSlot* parent = nullptr;    // of a part of an all_to_all_v
    uint32_t parts_left = 0;       // of an all_to_all_v
    uint32_t choice = UINT32_MAX;  // in `choices`
    uint32_t way = 0;              // of it
  };

  struct Member {  // another rank
    PeerId peer;
    bool known = false;  // `peer` is set
    bool up = false;
    bool bye = false;  // left in order
    bool lost = false;
    std::string label;  // "rank 3 (host, pid 17)"
    WorkerUid uid;
    RemoteRegion control;  // holds its control block
    uint64_t control_offset = 0;
    int can_view = -1;  // whether it can map us; -1: not told yet
    int we_can_view = -1;
    RemoteView view;  // of its control block
    std::unique_ptr<collectives::Link> link;
    collectives::DirectLink* direct = nullptr;
    collectives::TransferLink* transfer = nullptr;
    std::string offer;                // of a TransferLink, as it came
    bool ready = false;               // the link can be used
    uint64_t sent = 0, received = 0;  // point-to-point calls
    // What it announced, by sequence % kCalls; sequence 0: nothing.
    std::array<collectives::CallDescriptor, collectives::ControlBlock::kCalls> announced{};
    collectives::Standing standing;
    bool standing_fresh = false;
  };

  // mesh.cc
  absl::Status start();
  absl::Status meet();
  absl::Status connect_all();
  absl::Status link_up(Member& member);
  absl::Status publish_regions();
  Member* member_of(PeerId peer);
  uint32_t rank_of(const Member& member) const {
    return static_cast<uint32_t>(&member - members.data());
  }

  // calls.cc, point_to_point.cc
  struct Request {
    Collective collective = Collective::kAllReduce;
    const void* in = nullptr;
    void* out = nullptr;
    size_t count = 0;
    DataType type = DataType::kF32;
    ReduceOp op = ReduceOp::kSum;
    int root = 0;
    CallOptions options;
  };
  absl::StatusOr<Work> begin(const Request& request);
  absl::StatusOr<Work> begin_locked(const Request& request);
  absl::Status run(const Request& request);  // begins it and waits
  absl::StatusOr<Work> begin_point_to_point(bool sends, void* data, size_t count, DataType type,
                                            int other, const CallOptions& options);
  absl::StatusOr<Work> begin_all_to_all_v(const std::byte* in, absl::Span<const size_t> send_counts,
                                          absl::Span<const size_t> send_offsets, std::byte* out,
                                          absl::Span<const size_t> receive_counts,
                                          absl::Span<const size_t> receive_offsets, DataType type,
                                          const CallOptions& options);
  absl::Status check(const Request& request, bool& in_place) const;
  struct CachedPrograms;
  struct CachedChoice;
  struct Way;
  collectives::CallShape shape_of(const Request& request) const;
  absl::StatusOr<CachedChoice*> choose(const Request& request);
  absl::StatusOr<CachedPrograms*> programs(const collectives::ScheduleSpec& spec, bool in_place);
  absl::StatusOr<WorkSlot*> take_slot();
  WorkSlot* find(Work work);
  Work start_point_to_point(WorkSlot& slot, bool sends, std::byte* data, size_t count,
                            DataType type, uint32_t other, const CallOptions& options);
  static void on_done(collectives::Call& call, void* context);
  void finish(WorkSlot& slot, absl::Status result);

  // waiting.cc
  bool advance();         // false: nothing happened
  bool tick();            // the worker's part of it: mail, peers, deadlines
  void tick_sometimes();  // for callers that poll: not more often than deadlines need
  absl::Status wait(Work work);
  std::optional<absl::Status> reap(Work work);
  void nap(Time longest);   // until the worker has something to do
  void doze(Time longest);  // the same, and peers know that they must wake us; without `mutex`
  void run_background();
  Time now() const { return worker->clock().now(); }

  // failure.cc
  void drain();
  void on_events();
  void on_mail(Member& member, std::string_view mail);
  void on_down(Member& member, const absl::Status& why);
  // `culprit`: the rank that is to blame, or our own. Ends every call.
  void fail(absl::Status why, uint32_t culprit, bool tell_others);
  void on_executor_error(const absl::Status& error);
  void check_announcement(const Member& member, const collectives::CallDescriptor& theirs);
  void compare_calls();
  void check_deadlines();
  void diagnose(const collectives::Blocked& blocked);
  collectives::Standing standing() const;
  void tell(Member& member, collectives::Mail kind, std::string_view body);
  void tell_all(collectives::Mail kind, std::string_view body);
  std::string where(const collectives::Blocked& blocked) const;
  void leave();

  // trials.cc
  std::vector<Way> ways_for(const collectives::CallShape& shape, const collectives::Override& fixed,
                            absl::Status& status);
  absl::StatusOr<uint32_t> way_for(CachedChoice& cached);

  // calibrate.cc
  absl::Status calibrate();

  // calls.cc
  std::string explain(Collective collective, size_t bytes, const CallOptions& call_options);

  // shrink.cc
  void on_ballot(Member& member, std::string_view body);
  absl::StatusOr<std::unique_ptr<Communicator>> shrink();

  CommunicatorOptions options;
  const uint32_t rank;
  const uint32_t ranks;
  uint32_t node_size = 1;
  std::string host;

  mutable std::mutex mutex;
  std::unique_ptr<Worker> worker;
  std::unique_ptr<collectives::Memory> memory;
  Block control_memory;
  collectives::ControlBlock* control = nullptr;
  size_t published_regions = 0;
  std::vector<collectives::RankCard> cards;
  std::vector<Member> members;  // by rank; our own is unused
  std::unique_ptr<collectives::FlightRecorder> recorder;
  std::unique_ptr<collectives::Executor> executor;
  std::unique_ptr<collectives::CostModel> model;
  bool any_transfer = false;  // some link needs the worker to advance
  bool crowded = false;       // more ranks than cores on this machine

  std::vector<Block> buffers;  // of the caller; data null: free
  std::unique_ptr<WorkSlot[]> slots;
  uint64_t next_work = 1;
  uint64_t sequence = 0;  // of the last collective
  std::vector<WorkSlot*> finished;
  std::vector<WorkSlot*> in_flight;
  struct CachedPrograms {
    collectives::ScheduleSpec spec;
    bool in_place = false;
    uint32_t parts = 1;
    uint32_t max_message_parts = 1;
    std::vector<collectives::PreparedProgram> programs;  // by channel
  };
  std::vector<std::unique_ptr<CachedPrograms>> program_cache;
  // One way to run calls of a shape, and what it took.
  struct Way {
    collectives::Choice choice;
    CachedPrograms* programs[2] = {nullptr, nullptr};  // out of place, in place
    std::vector<double> trials;                        // seconds
    double last = 0;                                   // of the last call
  };
  // What is known of calls of one shape: the ways to run them, the predicted best first. They are
  // tried in turn, then all ranks agree on the one that was the fastest; see trials.cc.
  struct CachedChoice {
    collectives::CallShape shape;
    collectives::Override fixed;
    std::vector<Way> ways;
    uint32_t best = 0;   // in `ways`
    uint32_t calls = 0;  // so far, while ways are tried
    bool settled = false;
    std::vector<double> verdict;  // what the ranks measured, being combined
    Work combining;               // sequence 0: not
  };
  std::vector<CachedChoice> choices;
  size_t next_choice = 0;  // to be replaced, once all are in use
  CachedChoice* last_choice = nullptr;

  absl::Status broken;  // why everything fails
  std::atomic<bool> is_broken{false};
  bool leaving = false;
  Time calibrated_in{};
  Time diagnosing{};  // since when answers are awaited; zero: not
  Time next_look{};   // at deadlines
  uint32_t turns = 0;
  Notification notification;  // its memory is reused

  std::thread background;
  std::atomic<bool> stop{false};
  std::condition_variable background_wakes;
  std::condition_variable call_ended;
  std::atomic<uint64_t> sleeps{0};
  std::atomic<uint64_t> calls_made{0};

  // Shrinking: what the others voted last, by rank; and who serves the new group's rendezvous.
  std::vector<std::string> ballots;
  std::unique_ptr<collectives::RendezvousServer> server;
};

}  // namespace baton
