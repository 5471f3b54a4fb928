// The sim provider: hands what happened at simulated moments to the worker's next progress().
#include "tests/sim/fabric/provider.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/sim/fabric/network.h"

namespace baton::sim {

SimProvider::SimProvider(SimNetwork& network, size_t node, const ProviderContext& context)
    : network_(network),
      node_(node),
      key_(context.key),
      self_(context.self),
      regions_(context.regions),
      capabilities_{.name = "sim",
                    .rank = 400,  // whoever adds a simulated fabric means it
                    .available = true,
                    .detail = absl::StrFormat("node %u of %u of a simulated fabric, seed %u", node,
                                              network.options().nodes, network.options().seed)},
      incarnation_(network.new_incarnation()) {
  network_.set_provider(node_, this);
}

SimProvider::~SimProvider() {
  if (network_.provider(node_) == this) network_.set_provider(node_, nullptr);
}

absl::StatusOr<std::string> SimProvider::listen() {
  listening_ = true;
  return absl::StrCat(node_);
}

absl::Status SimProvider::reachable(const std::string& address, std::string_view) const {
  uint64_t node = 0;
  if (!absl::SimpleAtoi(address, &node) || node >= network_.options().nodes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("\"%s\" is not a node of this simulated fabric of %u nodes", address,
                        network_.options().nodes));
  }
  return absl::OkStatus();
}

absl::Status SimProvider::add_region(const RegionEntry&) { return absl::OkStatus(); }

// Nothing to fence: every packet looks its region up at the moment it is executed.
absl::Status SimProvider::remove_region(const RegionEntry&, EventSink&) { return absl::OkStatus(); }

SimProvider::Entry& SimProvider::add_entry(Entry::Kind kind, const SimRail* rail) {
  if (added_ == inbox_.size()) inbox_.emplace_back();
  Entry& entry = inbox_[added_++];
  network_.set_news();
  entry.kind = kind;
  entry.queue_pair = rail != nullptr ? rail->queue_pair_.id() : 0;
  return entry;
}

SimRail* SimProvider::find(const SimNetwork& network, uint32_t queue_pair) {
  QueuePair* found = network.find(queue_pair);
  return found != nullptr ? &static_cast<SimRail&>(found->owner()) : nullptr;
}

void SimProvider::report_done(const SimRail& rail, const Slice& slice, const absl::Status& status) {
  Entry& entry = add_entry(Entry::Kind::kDone, &rail);
  entry.transfer = slice.transfer->id;
  entry.slice = slice.index;
  entry.status = status;
}

void SimProvider::report_arrival(const SimRail& rail, const Arrival& arrival) {
  Entry& entry = add_entry(Entry::Kind::kArrived, &rail);
  entry.arrival = arrival;
  entry.payload.assign(arrival.notify);  // the sender's copy may be gone before we tell
}

void SimProvider::rail_lost(SimRail& rail, const absl::Status& why, bool closed) {
  ++network_.stats().rails_lost;
  add_entry(Entry::Kind::kDown, &rail).status = why;
  say_goodbye(rail, closed, why);
  const auto session = sessions_.find(rail.session());
  if (!rail.dialled() || session == sessions_.end()) return;
  if (live_rails(rail.session(), nullptr, true) == 0) {
    sessions_.erase(session);
  } else if (!closed) {
    redial(rail.session(), rail.index(), 0);
  }
}

// Not for good: the rail was lost, and the peer may call again.
void SimProvider::say_goodbye(const SimRail& rail, bool for_good, const absl::Status& cause) {
  if (!rail.queue_pair_.reachable() || network_.frozen(node_)) return;
  const SimLink& link = network_.link(node_, rail.peer_node(), rail.index()).spec;
  const std::string why =
      for_good ? absl::StrCat(self_.name, " closed the connection: ", cause.message())
               : std::string("the peer closed the connection");
  network_.at_quietly(network_.now() + link.latency, [this_network = &network_,
                                                      id = rail.queue_pair_.peer(), for_good, why] {
    SimRail* other = find(*this_network, id);
    if (other != nullptr && other->queue_pair_.reachable()) {
      other->lose(for_good ? absl::AbortedError(why) : absl::UnavailableError(why));
    }
  });
}

void SimProvider::forget(SimRail& rail) {
  if (rail.up()) say_goodbye(rail, false, absl::OkStatus());
  rails_.erase(std::remove(rails_.begin(), rails_.end(), &rail), rails_.end());
}

bool SimProvider::progress(EventSink& sink) {
  const size_t end = added_;
  const bool any = delivered_ != end;
  for (size_t i = delivered_; i < end; ++i) {
    delivered_ = i + 1;
    deliver(inbox_[i], sink);
  }
  if (delivered_ == added_) delivered_ = added_ = 0;
  return any;
}

void SimProvider::thaw() {
  for (size_t i = 0; i < rails_.size(); ++i) rails_[i]->pump();
}

void SimProvider::deliver_all(const SimRail& rail, EventSink& sink) {
  const uint32_t id = rail.queue_pair_.id();
  for (size_t i = delivered_; i < added_; ++i) {
    if (inbox_[i].kind != Entry::Kind::kNothing && inbox_[i].queue_pair == id) {
      deliver(inbox_[i], sink);
    }
  }
}

void SimProvider::deliver(Entry& entry, EventSink& sink) {
  const Entry::Kind kind = entry.kind;
  entry.kind = Entry::Kind::kNothing;
  SimRail* rail = entry.queue_pair != 0 ? find(network_, entry.queue_pair) : nullptr;
  switch (kind) {
    case Entry::Kind::kNothing:
      break;
    case Entry::Kind::kConnected:
      sink.connected(entry.session, entry.peer, std::move(entry.rail));
      break;
    case Entry::Kind::kConnectFailed:
      sink.connect_failed(entry.session, entry.status);
      break;
    case Entry::Kind::kAccepted:
      sink.accepted(entry.peer, std::move(entry.rail));
      break;
    case Entry::Kind::kDone:
      if (rail != nullptr) sink.slice_done(*rail, entry.transfer, entry.slice, entry.status);
      break;
    case Entry::Kind::kArrived:
      entry.arrival.notify = entry.payload;
      if (rail != nullptr) sink.arrived(*rail, entry.arrival);
      break;
    case Entry::Kind::kDown:
      if (rail != nullptr) {
        rail->state_ = SimRail::State::kReported;
        sink.rail_down(*rail, entry.status);
      }
      break;
  }
}

}  // namespace baton::sim
