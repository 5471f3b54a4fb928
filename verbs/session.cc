// A session with one peer: runs its rails, handles its messages and what rails report, ends.
#include "verbs/session.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace baton::verbs {

Session::Session(Shared& shared, std::unique_ptr<net::MessageStream> control, HelloInfo peer,
                 std::vector<PortOffer> offers, bool connecting)
    : shared_(shared),
      control_(std::move(control)),
      peer_(std::move(peer)),
      offers_(std::move(offers)),
      tuning_(shared.tuning.for_session(shared.hardware.ports.size() > 1 && offers_.size() > 1 &&
                                        (!connecting || shared.tuning.pairs != 1))),
      connecting_(connecting) {
  if (connecting_) pair_ports();
}

std::string Session::about_devices(const Port& port) const {
  const std::string registered = port.device->about_device_memory();
  if (registered.empty()) return "";
  std::string out = absl::StrCat("regions: ", registered);
  for (const auto& [pair, distance] : shared_.device_distances) {
    if (pair.first != port.index || distance == base::PciDistance::kUnknown) continue;
    absl::StrAppend(&out, "; CUDA device ", pair.second, " is ", base::words(distance), " (",
                    base::name_of(distance), ")");
  }
  return out;
}

// Rails that never came up take themselves out of the list of all, so they go while that is there.
Session::~Session() {
  slots_.clear();
  discarded_.clear();
}

bool Session::progress(Time now, bool look, EventSink& sink) {
  bool any = false;
  if (look || disturbed_) any = look_at_control(sink);
  for (size_t i = 0; i < rails_.size(); ++i) {
    VerbsRail* rail = rails_[i];
    any |= rail->progress(now, sink);
    if (i < rails_.size() && rails_[i] != rail) --i;
  }
  if (!look && !disturbed_) return any;
  disturbed_ = false;
  for (uint16_t i = 0; i < slots_.size() && !over_; ++i) {
    if (slots_[i].asked) answer(i, sink);
  }
  if (!over_) check_timers(now);
  if (!over_ && !slots_.empty() &&
      std::none_of(slots_.begin(), slots_.end(), [&](const Slot& slot) { return alive(slot); })) {
    end(slots_.front().why, sink);
    any = true;
  }
  while (!discarded_.empty()) discarded_.pop_back();
  busy_ = unfinished();
  return any;
}

bool Session::look_at_control(EventSink& sink) {
  bool any = false;
  while (const auto bytes = control_->next()) {
    any = true;
    const auto message = decode_message(*bytes);
    absl::Status status = message.ok() ? on_message(*message, nullptr, sink) : message.status();
    if (!status.ok()) control_->close(std::move(status), true);
  }
  if (!over_ && !control_->open()) {
    const bool carried =
        !control_->gone() && std::any_of(slots_.begin(), slots_.end(),
                                         [](const Slot& slot) { return slot.phase == Phase::kUp; });
    // The reason why a rail could not be made tells more than the hang-up that followed.
    const auto said =
        std::find_if(slots_.begin(), slots_.end(), [](const Slot& slot) { return !slot.why.ok(); });
    const bool failed = !established_ && said != slots_.end();
    if (!carried) end(failed ? said->why : control_->why(), sink);
  }
  return any;
}

// A lost rail is alive as long as another one is up: it comes back.
bool Session::alive(const Slot& slot) const {
  switch (slot.phase) {
    case Phase::kClosed:
      return false;
    case Phase::kIdle:
      return slot.rail != nullptr || slot.asked.has_value() || (!established_ && slot.why.ok());
    case Phase::kCalling:
    case Phase::kProving:
      return slot.rail != nullptr || !established_;
    case Phase::kUp:
      return true;
  }
  return false;
}

void Session::end(const absl::Status& why, EventSink& sink) {
  disturbed_ = true;
  // A rail that has not been seen to come up may have brought something.
  for (size_t i = 0; i < rails_.size(); ++i) {
    if (VerbsRail* rail = rails_[i]; !rail->known()) rail->look(sink);
  }
  over_ = true;
  const absl::Status cause = why.ok() ? absl::UnavailableError("the connection was closed") : why;
  control_->close(cause, false);
  for (Slot& slot : slots_) {
    slot.phase = Phase::kClosed;
    slot.pending.reset();
    if (slot.fresh != nullptr) discarded_.push_back(std::move(slot.fresh));
  }
  if (connecting_ && !established_) {
    sink.connect_failed(peer_.session, absl::UnavailableError(cause.message()));
  }
  const std::vector<VerbsRail*> rails = rails_;
  for (VerbsRail* rail : rails) rail->lose(cause, sink);
}

Time Session::next_timer() const {
  Time next = kNever;
  if (over_) return next;
  for (const VerbsRail* rail : rails_) next = std::min(next, rail->next_timer());
  for (const Slot& slot : slots_) {
    if (connecting_ || slot.phase != Phase::kIdle) next = std::min(next, slot.due);
  }
  return next;
}

bool Session::arm() {
  bool armed = true;
  for (VerbsRail* rail : rails_) armed &= rail->arm();
  return armed && !disturbed_ && (!over_ || !rails_.empty());
}

bool Session::unfinished() const {
  return slots_.empty() || std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) {
           return slot.phase != Phase::kUp ||
                  (slot.rail != nullptr && slot.rail->state() != VerbsRail::State::kUp);
         });
}

void Session::say(const std::string& message, const VerbsRail* about) {
  control_->send(message);
  for (const Slot& slot : slots_) {
    if (slot.phase != Phase::kUp || slot.rail == nullptr || slot.rail == about) continue;
    if (slot.rail->state() != VerbsRail::State::kUp) continue;
    slot.rail->send(message);
    return;
  }
}

bool Session::others_up(const VerbsRail& rail) const {
  return std::any_of(slots_.begin(), slots_.end(), [&](const Slot& slot) {
    return slot.rail != nullptr && slot.rail != &rail && slot.rail->port().up() &&
           slot.rail->state() == VerbsRail::State::kUp;
  });
}

const KnownRegion* Session::region(const RegionName& name, VerbsRail& rail) {
  const KnownRegion* known = regions_.find_or_ask(name);
  if (known == nullptr) {
    begin_message(scratch_, Kind::kAsk);
    encode(scratch_, name);
    rail.send(scratch_);
  }
  return known;
}

// Key and generation are checked here; bounds and rights by the adapter, and by the peer itself so
// that its error says more than the adapter's would.
void Session::on_ask(const RegionName& name, VerbsRail* rail) {
  RegionTable& table = shared_.context.regions;
  RegionAnswer answer{.name = name};
  answer.refusal =
      table.resolve(name.index, name.generation, name.key, Access::kLocal, 0, 0).status();
  if (answer.refusal.ok()) {
    answer.refusal = reaches_memory(table.entries()[name.index]);
  }
  if (answer.refusal.ok()) {
    const RegionEntry& entry = table.entries()[name.index];
    answer.base = reinterpret_cast<uintptr_t>(entry.base);
    answer.size = entry.size;
    answer.access = entry.access;
    for (const auto& port : shared_.hardware.ports) {
      const ibv_mr* registered = port->device->region(name.index);
      answer.rkeys.push_back(registered != nullptr ? registered->rkey : 0);
    }
  }
  begin_message(scratch_, Kind::kTell);
  encode(scratch_, answer);
  if (rail != nullptr) {
    rail->send(scratch_);
  } else {
    control_->send(scratch_);
  }
}

void Session::region_removed(const RegionName& name) {
  if (over_) return;
  begin_message(scratch_, Kind::kForget);
  encode(scratch_, name);
  say(scratch_, nullptr);
}

absl::Status Session::on_message(const Message& message, VerbsRail* rail, EventSink& sink) {
  disturbed_ = true;
  if (over_) return absl::OkStatus();
  switch (message.kind) {
    case Kind::kAsk: {
      auto name = decode_name(message.body);
      if (name.ok()) on_ask(*name, rail);
      return name.status();
    }
    case Kind::kTell: {
      auto answer = decode_answer(message.body);
      if (!answer.ok()) return answer.status();
      regions_.learn(*std::move(answer));
      return absl::OkStatus();
    }
    case Kind::kForget: {
      auto name = decode_name(message.body);
      if (name.ok()) regions_.forget(*name);
      return name.status();
    }
    case Kind::kConnect:
    case Kind::kConnected: {
      auto endpoint = decode_endpoint(message.body);
      if (!endpoint.ok()) return endpoint.status();
      const bool call = message.kind == Kind::kConnect;
      if (call == connecting_) break;
      call ? on_connect(*endpoint) : on_connected(*endpoint);
      return absl::OkStatus();
    }
    case Kind::kRefused:
    case Kind::kDrained:
    case Kind::kGoodbye: {
      auto note = decode_note(message.body);
      if (!note.ok()) return note.status();
      return on_rail_note(message.kind, *note, sink);
    }
    default:
      break;
  }
  return absl::InvalidArgumentError("the peer sent a message that is not valid in this state");
}

absl::Status Session::on_rail_note(Kind kind, const RailNote& note, EventSink& sink) {
  if (note.rail >= slots_.size()) return absl::OkStatus();  // of a rail that was never made
  Slot& slot = slots_[note.rail];
  if (kind == Kind::kRefused) {
    if (connecting_ && slot.phase == Phase::kCalling && slot.incarnation == note.incarnation) {
      attempt_failed(note.rail, absl::UnavailableError(std::string(note.text)));
    }
    return absl::OkStatus();
  }
  for (VerbsRail* rail : {slot.rail, slot.fresh.get()}) {
    if (rail == nullptr || rail->incarnation() != note.incarnation) continue;
    if (kind == Kind::kDrained) {
      rail->peer_drained(note.received, note.lost);
    } else {
      if (!rail->known()) rail->look(sink);
      slot.phase = Phase::kClosed;
      rail->lose(absl::AbortedError("the peer closed the connection"), sink);
    }
    break;
  }
  return absl::OkStatus();
}

void Session::rail_ready(VerbsRail& rail, EventSink& sink) {
  disturbed_ = true;
  Slot& slot = slots_[rail.index()];
  if (slot.phase != Phase::kProving || slot.incarnation != rail.incarnation()) return;
  slot.phase = Phase::kUp;
  slot.due = kNever;
  slot.why = absl::OkStatus();
  rail.set_up();
  if (slot.fresh.get() != &rail) return;  // recovered: the worker has not noticed anything
  VerbsRail* const replaced = std::exchange(slot.rail, &rail);
  rail.set_known();
  HelloInfo peer = peer_;
  peer.rail = rail.index();
  peer.link = peer_.link + ((uint64_t{rail.index()} & 1023) << 10 | (rail.incarnation() & 1023));
  peer.rails = static_cast<uint16_t>(slots_.size());
  if (!std::exchange(established_, true) && connecting_) {
    // Retries slots that failed before any rail was up: a port may have been down just then.
    for (Slot& other : slots_) {
      if (other.phase == Phase::kIdle && other.rail == nullptr && other.due == kNever) {
        other.due = now() + tuning_.hold;
      }
    }
  }
  if (connecting_) {
    sink.connected(peer_.session, peer, std::move(slot.fresh));
  } else {
    sink.accepted(peer, std::move(slot.fresh));
  }
  // After the new one is there: the peer must not seem to have lost its last rail.
  if (replaced != nullptr) {
    replaced->lose(absl::UnavailableError("the peer reconnected this rail"), sink);
  }
}

void Session::rail_drained(const VerbsRail& rail, bool lost) {
  disturbed_ = true;
  begin_message(scratch_, Kind::kDrained);
  encode(scratch_, RailNote{.rail = rail.index(),
                            .incarnation = rail.incarnation(),
                            .received = rail.received(),
                            .lost = lost,
                            .text = {}});
  say(scratch_, &rail);
}

void Session::rail_settled(const VerbsRail& rail) {
  disturbed_ = true;
  Slot& slot = slots_[rail.index()];
  slot.phase = Phase::kIdle;
  slot.recovery = true;
  slot.due = connecting_ ? Time::zero() : kNever;
}

void Session::rail_gone(VerbsRail& rail, const absl::Status& why, bool closed) {
  disturbed_ = true;
  Slot& slot = slots_[rail.index()];
  if (slot.rail != &rail && slot.fresh.get() != &rail) return;  // replaced already
  if (slot.rail == &rail) slot.rail = nullptr;
  if (slot.fresh.get() == &rail) discarded_.push_back(std::move(slot.fresh));
  slot.pending.reset();
  slot.recovery = false;
  slot.why = why;
  if (over_ || slot.phase == Phase::kClosed) return;
  slot.phase = closed ? Phase::kClosed : Phase::kIdle;
  slot.due = connecting_ && established_ ? now() + tuning_.hold : kNever;
  if (closed) {
    begin_message(scratch_, Kind::kGoodbye);
    encode(scratch_, RailNote{.rail = rail.index(), .incarnation = rail.incarnation(), .text = {}});
    say(scratch_, &rail);
  }
}

void Session::forget(VerbsRail& rail) {
  disturbed_ = true;
  rails_.erase(std::remove(rails_.begin(), rails_.end(), &rail), rails_.end());
  for (Slot& slot : slots_) {
    if (slot.rail == &rail) slot.rail = nullptr;
  }
}

void Session::port_changed(const Port& port) {
  for (VerbsRail* rail : rails_) {
    if (&rail->port() == &port) rail->port_changed();
  }
}

void Session::device_event(const Device& device, const Device::Event& event) {
  for (VerbsRail* rail : rails_) {
    if (rail->port().device == &device) rail->device_event(event);
  }
}

}  // namespace baton::verbs
