// A rail of the verbs provider: slices in, work requests on one queue pair out.
//
// Slices wait in `bulk_` in order, those of small transfers in `urgent_`, which overtakes. The
// first is turned into work requests as far as queue, credits and the limit on bytes in flight
// allow: pieces that are neighbours at the peer are gathered into one request. Once all of a slice
// is posted it waits for its completions.
//
// When the queue pair breaks the rail drains it through the error state and learns from the peer
// how many messages came over it, so that nothing that arrived is told again. After an access that
// the peer's adapter refused, the rail goes on with a new queue pair; anything else loses the rail,
// and its unfinished slices go to others.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/base/ring.h"
#include "transport/base/small_first.h"
#include "transport/internal/tables/rail_extras.h"
#include "transport/provider.h"
#include "verbs/device/regions.h"
#include "verbs/queue_pair.h"

namespace baton::verbs {

class Session;

class VerbsRail final : public Rail,
                        public internal::PromptRail,
                        public internal::CountingRail,
                        private QueuePairOwner {
 public:
  VerbsRail(Session& session, const Port& port, uint16_t index);
  ~VerbsRail() override;

  const Properties& properties() const override { return properties_; }
  double share(uint32_t region) const override;
  absl::Status moves(const RegionEntry& region) const override;
  bool reaches_devices() const override { return true; }
  std::string about_devices() const override;
  absl::Status reaches(const RemoteRegion& remote) const override;
  bool post(const Slice& slice, EventSink& sink) override;
  void abort(TransferId transfer, EventSink& sink) override;
  bool let_go(TransferId transfer) const override;
  void close(absl::Status why, EventSink& sink) override;
  bool prompt() const override {
    return state_ == State::kUp && queue_pair_->idle() && urgent_.empty() && bulk_.empty() &&
           control_.empty();
  }
  bool post_promptly(const TransferRequest& request, const TransferDescriptor& transfer) override;
  std::optional<internal::Ordinal> counted() const override;

  // Polls, posts, and moves on from a break. True if anything happened.
  bool progress(Time now, EventSink& sink);
  Time next_timer() const;
  bool arm() { return queue_pair_ == nullptr || queue_pair_->arm(); }

  // --- for the session ---
  enum class State {
    kConnecting,  // no kReady seen yet
    kUp,
    kBroken,  // draining, settling, or waiting for a new queue pair
    kDown,    // reported
  };
  State state() const { return state_; }
  uint16_t index() const { return index_; }
  uint32_t incarnation() const { return incarnation_; }
  const Port& port() const { return port_; }
  bool known() const { return known_; }
  void set_known() { known_ = true; }

  // A queue pair that is joined to the peer's: the first one, or a new one after a break. The side
  // that connects says kReady as soon as it can.
  void start(std::unique_ptr<QueuePair> queue_pair, const Endpoint& peer, uint32_t incarnation,
             bool connecting);
  void set_up() {  // kReady came, or went
    if (state_ == State::kConnecting) state_ = State::kUp;
  }
  // Takes up what has come over it.
  void look(EventSink& sink);
  // Puts a message of the session into the queue.
  void send(std::string message) { control_.push_back(std::move(message)); }
  // Call this after state or addresses of the port were read again.
  void port_changed();
  // The queue pair is no good any more. `lost`: and a new one would not help.
  void fail(const absl::Status& why, bool lost);
  // The peer's end broke too, after it had received that many messages.
  void peer_drained(uint64_t received, bool lost);
  bool settled() const { return state_ == State::kBroken && settled_; }
  // The number in this end's kDrained; valid only once drained.
  uint64_t received() const { return received_; }
  // Reports everything and goes down, now.
  void lose(const absl::Status& why, EventSink& sink);
  // An event of the device, which may be about the queue pair of this rail.
  void device_event(const Device::Event& event);

 private:
  static constexpr uint32_t kReservedCredits = 4;  // for kCredit and answers
  static constexpr uint32_t kReservedRoom = 4;
  static constexpr uint32_t kReadyTag = UINT32_MAX - 1;

  struct Active {
    bool used = false;
    bool prepared = false;  // region known, cursor stands
    bool posted = false;    // everything
    bool aborted = false;
    bool refused = false;  // once, by the peer's adapter
    bool told = false;     // its last message is in the queue, and is number `message`
    bool by_immediate = false;
    uint64_t message = 0;
    uint64_t order = 0;
    uint32_t outstanding = 0;  // work requests
    uint32_t rkey = 0;
    uint64_t base = 0;
    size_t notified = 0;  // bytes of the notification that went in fragments
    Slice slice;
    std::optional<TransferCursor> cursor;
    Piece piece;  // the next one, not in a work request yet
    bool has_piece = false;
    absl::Status failure;  // of its own making
  };

  // QueuePairOwner (rail_receive.cc)
  void sent(uint32_t tag, ibv_wc_status status) override;
  void received(std::string_view message) override;
  void counted(uint32_t immediate) override;
  void overrun() override;
  void unseen(const absl::Status& why) override;
  void make_known();
  void on_arrival(std::string_view body);
  void on_fragment(std::string_view body);

  Active& take(const Slice& slice);  // needs a free one
  // Sending (rail_send.cc)
  void pump();
  // Works on the first slice of a queue; false: there is none, or it cannot continue.
  bool pump_first(base::Ring<uint32_t>& queue);
  // Its notification has gone out in part: no other may begin.
  static bool half_told(const Active& active) { return active.notified > 0 && !active.told; }
  bool half_told(const base::Ring<uint32_t>& queue) const {
    return !queue.empty() && half_told(active_[queue.front()]);
  }
  base::Ring<uint32_t>& queue_of(const Active& active) {
    return active.slice.transfer->bytes <= kUrgentBytes ? urgent_ : bulk_;
  }
  bool prepare(Active& active);  // false: not yet, or it has failed and is gone
  bool post_bytes(Active& active);
  bool tell(Active& active);
  void gather(Active& active, QueuePair::Work& work);
  void advance(Active& active);
  bool send_control();
  void send_message(uint32_t tag);  // message_, with credits
  bool counts_by_immediate(const Active& active) const;
  static bool tells(const Slice& slice);

  uint32_t index_of(const Active& active) const {
    return static_cast<uint32_t>(&active - active_.data());
  }
  void finish(Active& active, absl::Status status);
  absl::Status went_down() const;
  void culprit(uint32_t tag, ibv_wc_status status);
  void probe(Time now);
  Time probe_after() const;
  bool move_on(Time now);
  void settle();
  void go_down(const absl::Status& why, const absl::Status& slices, bool closed);

  Session& session_;
  const Port& port_;
  const uint16_t index_;
  Properties properties_;
  State state_ = State::kConnecting;
  bool known_ = false;   // the worker has it
  bool ending_ = false;  // going down, or down
  uint32_t incarnation_ = 0;
  uint8_t peer_port_ = 0;
  std::unique_ptr<QueuePair> queue_pair_;
  EventSink* sink_ = nullptr;  // while one is at hand
  Time now_{};

  std::vector<Active> active_;
  std::vector<uint32_t> free_;
  base::Ring<uint32_t> urgent_;
  base::Ring<uint32_t> bulk_;
  base::SmallFirst turns_;  // of the two
  uint64_t next_order_ = 0;
  base::Ring<std::string> control_;
  std::string message_;  // being encoded
  std::string notify_;   // incoming fragments
  bool ready_owed_ = false;

  uint32_t credits_ = 0;   // receives that the peer has for us
  uint32_t owed_ = 0;      // receives posted again that the peer does not know of
  uint64_t messages_ = 0;  // that we sent over this queue pair, immediates among them

  // Broken.
  absl::Status why_;
  bool lost_ = false;
  bool drained_ = false;
  bool settled_ = false;
  std::optional<uint64_t> peer_received_;
  uint64_t received_ = 0;
  Time deadline_ = kNever;     // of the step under way
  Time last_moved_ = kNever;   // of a completion, while work is in the queue
  Time looked_ = kNever;       // of the last look at it
  Time quiet_since_ = kNever;  // nothing is in the queue, and nothing has come
  Time down_until_ = kNever;   // the port is down, and has so long to come back
};

}  // namespace baton::verbs
