// A worker whose peers come, go and say what a test says.
#pragma once

#include "tests/manual_clock.h"
#include "tests/test.h"
#include "tests/transport/scripted_provider.h"
#include "transport/internal/messages/control_message.h"

namespace baton {

class ScriptedPeers : public testing::Test {
 protected:
  ScriptedPeers() {
    WorkerOptions options;
    options.name = "scripted";
    options.key = *ClusterKey::from_bytes("a secret of the tests");
    options.clock = &clock_;
    options.settings = {{"peer.redial_ms", "5000"}};
    options.extra_providers.emplace_back([this](const ProviderContext&) {
      auto made = std::make_unique<ScriptedProvider>();
      provider_ = made.get();
      return made;
    });
    worker_ = *Worker::create(std::move(options));
    turn();
  }
  void turn() {
    for (int i = 0; i < 4; ++i) worker_->progress();
  }

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
  std::pair<PeerId, ScriptedRail*> up(const HelloInfo& who) {
    ScriptedRail* const rail = &call_in(who);
    const auto event = worker_->next_peer_event();
    EXPECT_TRUE(event && event->kind == PeerEvent::Kind::kUp);
    return {event->peer, rail};
  }
  void report(ScriptedRail& rail, const absl::Status& status = absl::OkStatus()) {
    rail.report(status);
    turn();
  }
  void lose(ScriptedRail& rail, const std::string& why = "cut") {
    rail.lose(why);
    turn();
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
  void notify(Rail& rail, const std::string& text) {
    provider_->sink->arrived(rail, {.transfer = {1, ++generation_}, .notify = text});
  }

  ManualClock clock_;
  ScriptedProvider* provider_ = nullptr;
  std::unique_ptr<Worker> worker_;
  uint32_t generation_ = 0;
};

}  // namespace baton
