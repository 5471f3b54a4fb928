// A worker's state of one peer. Only the progress thread uses it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "transport/address.h"
#include "transport/base/small_first.h"
#include "transport/internal/messages/control_message.h"
#include "transport/internal/tables/arrivals.h"
#include "transport/internal/tables/rail_extras.h"
#include "transport/internal/tables/rail_pace.h"
#include "transport/internal/tables/transfer_slots.h"
#include "transport/provider.h"
#include "transport/worker.h"

namespace baton::internal {

// A first-in first-out list of slots, linked through the slots themselves.
struct SlotQueue {
  uint32_t head = TransferSlot::kNone;
  uint32_t tail = TransferSlot::kNone;
};

// The most that one peer may have waiting in an inbox, in bytes: each notification counts its size
// and its overhead. Its sender holds the next one back until the application has read some.
inline constexpr uint64_t kNotificationWindow = 4 << 20;
inline constexpr uint64_t kNotificationCost = 64;

// Events of one peer that no caller has read: the next takes the place of the last.
inline constexpr uint32_t kUnreadEvents = 8;
// Answers and questions about lost rails that wait for a slot, of one peer; with more it is closed.
// A correct one asks once about each rail that it has lost.
inline constexpr uint32_t kMostUnsaid = 8192;
// Lost rails of which a peer has not said what had come. With more it is closed.
inline constexpr size_t kMostLostRails = 4096;
// The most that the inbox holds of peers that are down before it refuses new peers.
inline constexpr uint64_t kMostLeftBehind = 16 * kNotificationWindow;

// For heaps whose top is the earliest.
inline constexpr auto kLater = [](const auto& a, const auto& b) { return a.first > b.first; };

struct RailState {
  // A slice of so many bytes is on the rail; or is not any more.
  void took(uint64_t bytes) {
    ++outstanding;
    messages += bytes == 0;
    outstanding_bytes += bytes;
  }
  void gave_back(uint64_t bytes) {
    --outstanding;
    messages -= bytes == 0;
    outstanding_bytes -= bytes;
  }

  std::unique_ptr<Rail> rail;
  int rank = 0;       // of its provider
  uint64_t link = 0;  // HelloInfo::link
  uint64_t outstanding_bytes = 0;
  uint32_t outstanding = 0;
  uint32_t messages = 0;         // of them, notifications without bytes
  uint32_t moved = 0;            // slices that it gave back for others to do
  bool full = false;             // refused a slice; cleared by its next report
  PromptRail* prompt = nullptr;  // the rail, where it is one
  RailPace pace;
};

// A rail that was lost while slices of ours were on it. They go on when the peer has said which of
// them had landed, and that no byte of the others will.
struct LostRail {
  explicit LostRail(uint64_t number) : link(number) {}

  uint64_t link = 0;
  std::vector<SliceName> unsettled;
  std::vector<SliceName> named;  // the same, by the names that the peer knows them by
  bool gone = false;             // it has reported all that it had
  Time asked_at = kNever;        // the peer has been asked
  bool heard = false;            // by the peer: its answer may have been lost with any rail
};

// How a peer of which all rails were lost is called again.
struct Redial {
  Time give_up_at = kNever;  // kNever: it answered since it was lost last
  Time call_at = kNever;
  Time pause{};          // before the call after that
  bool calling = false;  // a call is under way
  std::string hopeless;  // why it is no use to call again; empty: it may be
  bool gone = false;     // no worker lives at its address any more
};

// How a peer that is up is called again over a better provider than those of its rails.
struct Failback {
  bool wanted = false;   // there is a better one
  bool told = false;     // the log knows
  bool calling = false;  // a call is under way, over `route`
  Time call_at = kNever;
  Time pause{};        // before the call after that
  Time regained_at{};  // when the best one was there again, last
  std::string route;
  std::vector<std::string> untried;  // of this round, the best first
  std::vector<std::string> refused;  // by the peer: not called any more
};

// How a peer that is up is called over worse providers, for regions that its rails do not reach.
struct Around {
  bool calling = false;  // a call is under way, over `route`
  std::string route;
  std::vector<std::string> untried;  // of this round, the best first
  std::vector<std::string> notes;    // what became of the others
  std::vector<TransferId> waiting;   // transfers that have no rail; some have been stopped
  std::string passed;                // the provider that was passed over first
  std::string why;
  Time up_at = kNever;               // when the last call was answered
  std::vector<std::string> refused;  // came up and were closed at once: not called any more
};

// A peer that one side asked to part with: all transfers of both end first, then the rails close.
struct Parting {
  Time give_up_at = kNever;
  bool begun = false;   // our transfers have been stopped
  bool told = false;    // the peer has been asked, and knows that nothing of ours is open
  bool heard = false;   // so has it asked us
  bool agreed = false;  // nothing moves any more on either side
  absl::Status why;     // for our callers
};

struct Peer {
  uint32_t index = 0;
  uint32_t generation = 0;
  PeerState state = PeerState::kConnecting;
  absl::Status why;
  std::string name;
  WorkerUid uid;
  uint16_t protocol = kHighestProtocol;  // that both speak
  uint64_t session = 0;
  // The best provider's rails come first, and only they get slices. The others are a reserve, and
  // serve regions that the best ones do not reach.
  std::vector<RailState> rails;
  // Transfers with slices to post. Small ones and messages overtake bulk: control never waits
  // behind it.
  SlotQueue urgent;
  SlotQueue bulk;
  base::SmallFirst turns;  // of the two
  SlotQueue held;          // transfers whose notification waits for credit
  Arrivals arrivals;

  bool dialled = false;  // we called it first
  std::vector<LostRail> lost_rails;
  std::vector<uint64_t> fenced;  // links that the peer has given up before they came up here
  // Counts of rails that were lost here; the newest last.
  std::vector<std::pair<uint64_t, Ordinal>> counted;
  std::string goodbye;  // what it said when it closed a rail for good
  Redial redial;
  Failback back;
  Around around;
  uint32_t open = 0;    // transfers of callers that have begun and not ended
  uint32_t events = 0;  // of it, that no caller has read
  uint32_t unsaid = 0;  // words for it that wait for a slot
  std::optional<Parting> parting;
  std::shared_ptr<absl::Status> parted;  // made by the first who asks; set when the peer is down

  // Notifications, in bytes as the inbox counts them.
  uint64_t credit = kNotificationWindow;  // we may still send
  uint64_t unread = 0;                    // from the peer, in our inbox
  uint64_t untold = 0;                    // read here, credit not given back yet

  // Connecting: the routes still to try, best first, and what became of the others.
  Address address;
  std::string require;
  std::vector<std::string> untried;
  std::string route;               // the provider that is being tried
  std::vector<std::string> notes;  // "shm: not used because ..."
  std::string rail_lost;           // why the last one was lost, while others carried on

  // On the worker's lists: each peer is on a list once.
  bool may_be_forgotten = false;  // is down, and nothing of it is unread
  bool ready = false;             // has slices to post, and rails
  bool creditor = false;          // is owed credit for notifications that were read here
  Time timer = kNever;            // its earliest entry among the worker's timers

  PeerId id() const { return {index, generation}; }
  // The state of a rail, which may be gone already: then null.
  RailState* find(const Rail* rail) {
    for (RailState& each : rails) {
      if (each.rail.get() == rail) return &each;
    }
    return nullptr;
  }
  // The best rail that reaches the region.
  RailState* reaching(const RemoteRegion& region) {
    for (RailState& each : rails) {
      if (each.rail->reaches(region).ok()) return &each;
    }
    return nullptr;
  }
};

}  // namespace baton::internal
