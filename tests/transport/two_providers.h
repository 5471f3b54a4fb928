// A worker with two scripted providers, a fast and a slow one, and a peer that has both.
#pragma once

#include "tests/transport/scripted_worker.h"

namespace baton {

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
