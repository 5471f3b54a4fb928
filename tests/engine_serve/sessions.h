// KV sessions for tests of engines.
#pragma once

#include "engine/handoff/hand_off.h"
#include "engine/model/model.h"
#include "tests/std.h"

namespace baton::engine::serve {

// Of the rank that has this model's part, over one provider.
inline std::unique_ptr<handoff::HandOff> test_session(const std::string& name,
                                                      const std::string& provider,
                                                      const Model& model,
                                                      handoff::HandOffOptions options = {},
                                                      const std::string& checkpoint = "") {
  options.name = name;
  options.model = options.fingerprint = checkpoint.empty() ? model.fingerprint() : checkpoint;
  options.shard = {.rank = static_cast<uint32_t>(model.shard().rank),
                   .ranks = static_cast<uint32_t>(model.shard().ranks),
                   .heads = static_cast<uint32_t>(model.config().num_kv_heads)};
  options.staging_bytes = size_t{1} << 20;
  options.worker.providers = {provider};
  options.worker.key = *ClusterKey::from_bytes("a secret for these tests, 32 bytes long");
  return *handoff::HandOff::create(std::move(options));
}

}  // namespace baton::engine::serve
