// A session (kvtransfer/kv_session.h) over this engine's cache: what kv_transfer_params of a
// request ask for, between engines of any make. docs/vllm.md is the manual.
//
// Prefill: a request with Request::hand_over is open()ed; after each layer of each of its steps the
// engine says how many of its tokens are computed; when it ends, its blocks are held until
// released() names it. Decode: the prompt of a request with Request::remote_prefill is a load of
// KvSource, whose KvLoad::transfer says where it is.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/handoff/staging.h"
#include "engine/kernels/kv_cache.h"
#include "kvtransfer/kv_session.h"

namespace baton::engine::handoff {

struct HandOffOptions : kvtransfer::KvSessionOptions {
  // Identifies the checkpoint, equal at engines that have the same: checkpoint_digest(), or a name.
  std::string model;
  std::string fingerprint;  // of the arithmetic too: Model::fingerprint()
  size_t staging_bytes = size_t{256} << 20;
};

class HandOff : public kvtransfer::KvSession {
 public:
  // InvalidArgument: no name or no model. Otherwise what KvSession::create() and Staging::make()
  // say.
  static absl::StatusOr<std::unique_ptr<HandOff>> create(HandOffOptions options);
  ~HandOff() override { close(); }  // before the staging memory goes
  // The engine's cache, before all else. `device`: the one whose memory it is; none: the host.
  // `file`: what it maps, as Agent::register_mapped() wants it; -1: none.
  absl::Status use_cache(const KvCache& cache, std::optional<int> device = std::nullopt,
                         int file = -1) {
    return use_cache_(*this, cache, device, file);
  }

 private:
  // By its address, so that an engine that hands nothing over links without this library.
  using UseCache = absl::Status (*)(HandOff&, const KvCache&, std::optional<int>, int file);
  HandOff(KvSession&& session, HandOffOptions options, std::unique_ptr<Staging> staging,
          UseCache how)
      : KvSession(std::move(session)),
        options_(std::move(options)),
        staging_(std::move(staging)),
        use_cache_(how) {}
  static absl::Status use_cache_of(HandOff& hand_off, const KvCache& cache,
                                   std::optional<int> device, int file);

  const HandOffOptions options_;
  const std::unique_ptr<Staging> staging_;
  const UseCache use_cache_;
};

}  // namespace baton::engine::handoff
