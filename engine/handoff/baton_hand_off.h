// HandOff over a Baton agent, by the messages of vLLM's connector baton.vllm: a server with one can
// be either half of a pair, whatever make the other half is. docs/vllm.md is the manual.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/handoff/hand_off.h"
#include "transport/clock.h"
#include "transport/worker.h"

namespace baton::engine::handoff {

struct HandOffOptions {
  std::string name;                // unique among engines that meet; its agent is name/0
  std::string host = "127.0.0.1";  // where others reach it
  uint16_t port = 0;               // what it listens on; 0: any
  // Identifies the checkpoint, equal at engines that have the same: checkpoint_digest(), or a name.
  std::string model;
  std::string fingerprint;  // of the arithmetic too: Model::fingerprint()
  // How long blocks stay that no engine asks for.
  Time lease = patient(std::chrono::seconds(60));
  size_t staging_bytes = size_t{256} << 20;
  // Key, providers and settings; its name and listener are made of what is above.
  WorkerOptions worker;
  const Clock* clock = nullptr;  // default: Clock::steady()
  bool start_thread = true;      // false: nothing moves but by turn(), for tests
};

class BatonHandOff : public HandOff {
 public:
  // InvalidArgument: no name or no model. Otherwise what Agent::create() and Staging::make() say.
  static absl::StatusOr<std::unique_ptr<BatonHandOff>> create(HandOffOptions options);

  // Statistics of the worker that moves the bytes. Any thread, until close().
  virtual WorkerStats stats() const = 0;
  // Host and port, as decode has to be told.
  virtual std::string address() const = 0;
  // Hands out what came and moves everything on. Whether anything is under way. Of the thread that
  // serves, or in its place.
  virtual bool turn() = 0;
};

}  // namespace baton::engine::handoff
