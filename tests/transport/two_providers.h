// A worker with two scripted providers, a fast and a slow one, and a peer that has both.
#pragma once

#include "tests/manual_clock.h"
#include "tests/test.h"
#include "tests/transport/scripted_provider.h"

namespace baton {

class TwoProviders : public testing::Test {
 protected:
  void make_worker(SettingValues settings) {
    WorkerOptions options;
    options.name = "scripted";
    options.key = *ClusterKey::from_bytes("a secret of the tests");
    options.clock = &clock_;
    options.settings = std::move(settings);
    const auto add = [&](ScriptedProvider*& made, const char* name, int rank) {
      options.extra_providers.emplace_back([&made, name, rank](const ProviderContext&) {
        auto provider = std::make_unique<ScriptedProvider>(name, rank);
        made = provider.get();
        return provider;
      });
    };
    add(fast_, "fast", 300);
    add(slow_, "slow", 10);
    worker_ = *Worker::create(std::move(options));
    who_ = {.uid = WorkerUid::random(), .name = "peer"};
    turn();
  }
  std::string address() const {
    return Address{.uid = who_.uid,
                   .name = who_.name,
                   .host_id = this_host_id(),
                   .providers = {{"fast", "f"}, {"slow", "s"}}}
        .encode();
  }
  void turn() {
    for (int i = 0; i < 4; ++i) worker_->progress();
  }
  void report(ScriptedRail& rail, const absl::Status& status = absl::OkStatus()) {
    rail.report(status);
    turn();
  }
  void lose(ScriptedRail& rail, const std::string& why = "cut") {
    rail.lose(why);
    turn();
  }
  ScriptedRail* answer(ScriptedProvider& provider) {
    who_.session = provider.calls.front().session;
    who_.link = ++links_;
    ScriptedRail* rail = provider.answer(who_);
    turn();
    return rail;
  }

  ManualClock clock_;
  ScriptedProvider* fast_ = nullptr;
  ScriptedProvider* slow_ = nullptr;
  std::unique_ptr<Worker> worker_;
  HelloInfo who_;
  PeerId peer_;
  uint64_t links_ = 0;
};

}  // namespace baton
