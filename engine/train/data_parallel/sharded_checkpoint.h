// Checkpoints of training in shards: one file per rank, and a manifest that makes them one.
//
//   DIR/step-00000400/shard-0-of-2.safetensors   weights, first_moments, second_moments (f32)
//   DIR/step-00000400/shard-1-of-2.safetensors
//   DIR/step-00000400/manifest.json              written last: sizes and XXH3 checksums
//
// All of it is written and synced in step-00000400.part, which is renamed when it is whole: a
// checkpoint that is there is never written to. One of the same step makes way as step-00000400.old
// and is removed then. Whatever a crash leaves, the last checkpoint is found whole. Shards say
// which elements they hold, so any number of ranks can read what another number wrote.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/model/config.h"
#include "engine/train/data_parallel/buckets.h"

namespace baton::engine::train {

// The properties that a checkpoint and the run that resumes from it must share.
struct RunIdentity {
  uint64_t model = 0;  // hash of the config
  uint64_t data = 0;   // hash of the training tokens
  uint64_t seed = 0;   // seed of weights and data order
  bool operator==(const RunIdentity&) const = default;
};
RunIdentity identity_of(const ModelConfig& model, absl::Span<const int32_t> tokens, uint64_t seed);

// A shard as the manifest names it.
struct ShardSeal {
  uint64_t bytes = 0;
  uint64_t checksum = 0;  // XXH3, of the whole file
};

struct CheckpointManifest {
  std::string path;  // of the checkpoint: "DIR/step-00000400"
  int64_t steps = 0;
  uint64_t parameters = 0;     // elements of the flat array, without padding
  int64_t schedule_steps = 0;  // how many the whole run is to have; 0: it was not said
  RunIdentity identity;
  std::vector<ShardSeal> shards;
};

// "DIR/step-00000400"
std::string checkpoint_path(const std::string& directory, int64_t steps);

// Writes this rank's shard. All ranks must have done so before anyone writes the manifest.
// DataLoss, and nothing written, where a number in it is not finite.
absl::StatusOr<ShardSeal> write_shard(const std::string& directory, const ShardState& state,
                                      int rank, int ranks);
// Makes a checkpoint of the shards, then removes all but the newest `keep` checkpoints and whatever
// incomplete ones are older than it.
absl::Status finish_checkpoint(const std::string& directory, const CheckpointManifest& manifest,
                               int keep = 2);

// NotFound where `directory` has no complete checkpoint, of whatever run.
absl::Status has_checkpoint(const std::string& directory);
// The newest complete checkpoint in `directory`. NotFound: there is none. InvalidArgument: its
// manifest is damaged, or belongs to another model, text or seed.
absl::StatusOr<CheckpointManifest> find_checkpoint(const std::string& directory,
                                                   const RunIdentity& identity,
                                                   uint64_t parameters);
// One shard, verified against the manifest. DataLoss names the file that is missing, cut off or
// damaged and says what to do.
absl::StatusOr<ShardState> read_shard(const CheckpointManifest& manifest, int shard);

}  // namespace baton::engine::train
