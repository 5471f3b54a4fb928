// A worker whose connections a test makes, feeds and loses by hand.
#pragma once

#include "tests/manual_clock.h"
#include "tests/test.h"
#include "tests/transport/scripted_provider.h"

namespace baton {

class ScriptedWorker : public testing::Test {
 protected:
  struct Wanted {
    ScriptedProvider*& made;
    const char* name;
    int rank = 0;
  };
  void make_worker(SettingValues settings, std::initializer_list<Wanted> providers) {
    WorkerOptions options;
    options.name = "scripted";
    options.key = *ClusterKey::from_bytes("a secret of the tests");
    options.clock = &clock_;
    options.settings = std::move(settings);
    for (const Wanted& each : providers) {
      options.extra_providers.emplace_back([each](const ProviderContext&) {
        auto provider = std::make_unique<ScriptedProvider>(each.name, each.rank);
        each.made = provider.get();
        return provider;
      });
    }
    worker_ = *Worker::create(std::move(options));
    turn();
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
  // A write of all of `local` to a region of the peer's that is as large.
  static TransferRequest write_of(const MemoryRegion& local, PeerId peer, const WorkerUid& owner,
                                  uint32_t index = 0) {
    const Layout all = Layout::contiguous(0, local.size);
    return {.peer = peer,
            .local = local,
            .local_layout = all,
            .remote = {.owner = owner,
                       .key = 1,
                       .size = local.size,
                       .index = index,
                       .generation = 1,
                       .access = Access::kRemoteReadWrite},
            .remote_layout = all};
  }

  ManualClock clock_;
  std::unique_ptr<Worker> worker_;
};

// A worker with two scripted providers, a fast and a slow one, and a peer that has both.

class TwoProviders : public ScriptedWorker {
 protected:
  void make_worker(SettingValues settings) {
    ScriptedWorker::make_worker(std::move(settings), {{fast_, "fast", 300}, {slow_, "slow", 10}});
    who_ = {.uid = WorkerUid::random(), .name = "peer"};
  }
  std::string address() const {
    return Address{.uid = who_.uid,
                   .name = who_.name,
                   .host_id = this_host_id(),
                   .providers = {{"fast", "f"}, {"slow", "s"}}}
        .encode();
  }
  ScriptedRail* answer(ScriptedProvider& provider) {
    who_.session = provider.calls.front().session;
    who_.link = ++links_;
    ScriptedRail* rail = provider.answer(who_);
    turn();
    return rail;
  }

  ScriptedProvider* fast_ = nullptr;
  ScriptedProvider* slow_ = nullptr;
  HelloInfo who_;
  PeerId peer_;
  uint64_t links_ = 0;
};

}  // namespace baton
