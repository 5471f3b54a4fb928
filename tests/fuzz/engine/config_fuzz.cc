// Fuzzes the JSON files of a model directory: config.json, whose accepted form must survive a round
// trip, and model.safetensors.index.json, whose shard names must not lead out of the directory.

#include "engine/model/checkpoint.h"
#include "engine/model/config.h"
#include "tests/std.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view json(reinterpret_cast<const char*>(data), size);
  if (const auto config = baton::engine::parse_model_config(json); config.ok()) {
    if (!config->validate().ok()) std::abort();
    const auto again =
        baton::engine::parse_model_config(baton::engine::model_config_to_json(*config));
    if (!again.ok() || again->num_parameters() != config->num_parameters()) std::abort();
  }
  if (const auto shards = baton::engine::parse_shard_index(json); shards.ok()) {
    for (const auto& [tensor, shard] : *shards) {
      if (shard.empty() || shard == ".." || shard.find('/') != shard.npos) std::abort();
    }
  }
  return 0;
}
