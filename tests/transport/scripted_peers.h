// A worker whose peers come, go and say what a test says.
#pragma once

#include "tests/transport/scripted_worker.h"
#include "transport/internal/messages/control_message.h"

namespace baton {

class ScriptedPeers : public ScriptedWorker {
 protected:
  ScriptedPeers() { make_worker({{"peer.redial_ms", "5000"}}, {{provider_, "scripted"}}); }

  // A peer that called, with an address of its own.
  HelloInfo caller(uint64_t session, uint64_t link) const {
    HelloInfo who{.uid = WorkerUid::random(), .name = "caller", .session = session, .link = link};
    who.address = Address{.uid = who.uid,
                          .name = who.name,
                          .host_id = this_host_id(),
                          .providers = {{"scripted", "there"}}}
                      .encode();
    return who;
  }
  ScriptedRail& call_in(const HelloInfo& who) {
    ScriptedRail& rail = provider_->call_in(who);
    turn();
    return rail;
  }
  ScriptedRail& call_in(HelloInfo who, uint64_t link) {
    who.link = link;
    return call_in(who);
  }
  std::pair<PeerId, ScriptedRail*> up(const HelloInfo& who) {
    ScriptedRail* const rail = &call_in(who);
    const auto event = worker_->next_peer_event();
    EXPECT_TRUE(event && event->kind == PeerEvent::Kind::kUp);
    return {event->peer, rail};
  }
  // What the peer says about its rails.
  void say(Rail& rail, const internal::ControlMessage& message) {
    ask(rail, message);
    turn();
  }
  void ask(Rail& rail, const internal::ControlMessage& message) {
    const std::string words = message.encode();
    provider_->sink->arrived(rail, {.transfer = {0, ++generation_},
                                    .counter_index = CounterTable::kControl,
                                    .counter_generation = 1,
                                    .increment = 0,
                                    .notify = words});
  }
  void give_credit(Rail& rail, uint64_t amount) {
    provider_->sink->arrived(rail, {.transfer = {2, ++generation_},
                                    .counter_index = CounterTable::kCredits,
                                    .counter_generation = 1,
                                    .increment = amount});
    turn();
  }
  void notify(Rail& rail, const std::string& text) {
    provider_->sink->arrived(rail, {.transfer = {1, ++generation_}, .notify = text});
  }

  ScriptedProvider* provider_ = nullptr;
  uint32_t generation_ = 0;
};

}  // namespace baton
