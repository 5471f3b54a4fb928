// Sharded checkpoints: shards are safetensors files; the manifest is JSON.
#include "engine/train/data_parallel/sharded_checkpoint.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <system_error>
#include <tuple>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "engine/files/files.h"
#include "engine/files/json_fields.h"
#include "engine/files/safetensors.h"
#include "engine/files/utf8.h"

namespace baton::engine::train {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kFormat = 1;
constexpr int64_t kMaxShards = 1 << 16;
constexpr size_t kMaxShardBytes = size_t{16} << 30;
constexpr const char* kTensors[] = {"weights", "first_moments", "second_moments"};
constexpr std::string_view kStepPrefix = "step-";

uint64_t checksum(std::string_view bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

std::string shard_name(int64_t shard, int64_t shards) {
  return absl::StrFormat("shard-%d-of-%d.safetensors", shard, shards);
}
std::string manifest_path(const std::string& checkpoint) { return checkpoint + "/manifest.json"; }

// JSON numbers are doubles to many readers, so 64-bit words travel as text.
std::string hex(uint64_t value) { return absl::StrFormat("%016x", value); }
absl::StatusOr<uint64_t> hex_field(const nlohmann::json& object, const char* key) {
  absl::StatusOr<std::string> text = string_field(object, key, "");
  if (!text.ok()) return text.status();
  uint64_t value = 0;
  if (text->size() != 16 || !absl::SimpleHexAtoi(*text, &value)) {
    return absl::InvalidArgumentError(absl::StrFormat("\"%s\" must be 16 hex digits", key));
  }
  return value;
}

constexpr std::string_view kPart = ".part", kOld = ".old", kRemoved = ".removed";
std::string part_of_checkpoint(const std::string& checkpoint) {
  return absl::StrCat(checkpoint, view(kPart));
}

// A directory "step-N", "step-N.part", "step-N.old" or "step-N.removed".
struct Place {
  int64_t steps = 0;
  std::string path;
  std::string suffix;
};

// Oldest first, complete or not; the old one of two of the same step first.
std::vector<Place> places_in(const std::string& directory) {
  std::vector<Place> found;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    const std::string suffix = it->path().extension().string();
    const std::string stem = it->path().stem().string();
    Place place{0, it->path().string(), suffix};
    if (stem.compare(0, kStepPrefix.size(), kStepPrefix) == 0 &&
        absl::SimpleAtoi(stem.substr(kStepPrefix.size()), &place.steps) &&
        (suffix.empty() || suffix == kPart || suffix == kOld || suffix == kRemoved)) {
      found.push_back(std::move(place));
    }
  }
  std::sort(found.begin(), found.end(), [](const Place& a, const Place& b) {
    return std::make_tuple(a.steps, a.suffix != kOld, a.suffix) <
           std::make_tuple(b.steps, b.suffix != kOld, b.suffix);
  });
  return found;
}

bool is_complete(const Place& place) {
  std::error_code error;
  return place.suffix != kPart && place.suffix != kRemoved &&
         fs::exists(manifest_path(place.path), error);
}

absl::StatusOr<std::string> newest_in(const std::string& directory) {
  std::string newest;
  for (const Place& place : places_in(directory)) {
    if (is_complete(place)) newest = place.path;
  }
  if (!newest.empty()) return newest;
  return absl::NotFoundError(
      absl::StrCat("there is no complete checkpoint in ", directory,
                   ": a directory step-NNNNNNNN with a manifest.json. Start without --resume"));
}

// Under another name first: whatever moment a kill comes at, what bears the name of a checkpoint is
// whole, and what is left of this one goes with the next that is removed.
void remove_checkpoint(const std::string& path) {
  std::error_code error;
  const fs::path gone = fs::path(path).replace_extension(kRemoved);
  if (gone != path) {
    fs::remove_all(gone, error);
    fs::rename(path, gone, error);
  }
  fs::remove_all(gone, error);
}

// Puts what is whole in its ".part" into the place of the checkpoint.
absl::Status commit(const std::string& directory, const std::string& checkpoint) {
  const std::string part = part_of_checkpoint(checkpoint);
  const std::string old = absl::StrCat(checkpoint, view(kOld));
  if (absl::Status status = sync_directory(part); !status.ok()) return status;
  std::error_code error;
  if (fs::exists(manifest_path(checkpoint), error)) {
    remove_checkpoint(old);
    fs::rename(checkpoint, old, error);
  } else {
    remove_checkpoint(checkpoint);  // what a crash left
  }
  if (!error) fs::rename(part, checkpoint, error);
  if (error) {
    return absl::ErrnoToStatus(error.value(),
                               absl::StrCat("renaming ", part, " into ", checkpoint));
  }
  if (absl::Status status = sync_directory(directory); !status.ok()) return status;
  remove_checkpoint(old);
  return absl::OkStatus();
}

std::string encode_pieces(const std::vector<FlatRange>& pieces) {
  std::string text;
  for (const FlatRange& piece : pieces) {
    absl::StrAppend(&text, text.empty() ? "" : ",", piece.begin, "-", piece.end);
  }
  return text;
}

// Ordered, disjoint, and `owned` elements in all.
absl::StatusOr<std::vector<FlatRange>> decode_pieces(const std::string& text, size_t owned) {
  std::vector<FlatRange> pieces;
  size_t sum = 0, last = 0;
  for (const std::string& item : std::vector<std::string>(absl::StrSplit(text, ','))) {
    const std::vector<std::string> ends = absl::StrSplit(item, '-');
    FlatRange piece;
    if (ends.size() != 2 || !absl::SimpleAtoi(ends[0], &piece.begin) ||
        !absl::SimpleAtoi(ends[1], &piece.end) || piece.begin < last || piece.end <= piece.begin) {
      return absl::InvalidArgumentError(absl::StrCat("its pieces are invalid: \"", text, "\""));
    }
    last = piece.end;
    sum += piece.size();
    pieces.push_back(piece);
  }
  if (sum != owned) {
    return absl::InvalidArgumentError(
        absl::StrFormat("its pieces have %u elements, its tensors %u", sum, owned));
  }
  return pieces;
}

absl::StatusOr<ShardState> parse_shard(std::string_view bytes) {
  absl::StatusOr<SafetensorsHeader> header = parse_safetensors(bytes);
  if (!header.ok()) return header.status();
  const auto first = header->tensors.find(kTensors[0]);
  const auto pieces = header->metadata.find("pieces");
  const auto steps = header->metadata.find("steps");
  ShardState state;
  if (first == header->tensors.end() || pieces == header->metadata.end() ||
      steps == header->metadata.end() || !absl::SimpleAtoi(steps->second, &state.steps)) {
    return absl::InvalidArgumentError("it is not a shard of a training checkpoint");
  }
  const size_t owned = first->second.elements();
  absl::StatusOr<std::vector<FlatRange>> ranges = decode_pieces(pieces->second, owned);
  if (!ranges.ok()) return ranges.status();
  state.pieces = *std::move(ranges);
  state.values = AlignedArray<float>(3 * owned);
  for (size_t i = 0; i < 3; ++i) {
    const auto tensor = header->tensors.find(kTensors[i]);
    if (tensor == header->tensors.end() || tensor->second.type != TensorType::kF32 ||
        tensor->second.elements() != owned) {
      return absl::InvalidArgumentError(
          absl::StrFormat("\"%s\" is missing or is not f32 [%u]", kTensors[i], owned));
    }
    std::memcpy(state.values.data() + i * owned, bytes.data() + tensor->second.begin,
                owned * sizeof(float));
  }
  return state;
}

absl::StatusOr<CheckpointManifest> parse_manifest(const std::string& checkpoint,
                                                  const std::string& text) {
  absl::StatusOr<nlohmann::json> json = parse_json(text, "the manifest");
  if (!json.ok()) return json.status();
  CheckpointManifest manifest;
  manifest.path = checkpoint;
  const auto format = int_field(*json, "format", 1, kFormat, 0);
  if (!format.ok()) return format.status();
  if (*format != kFormat) return absl::InvalidArgumentError("\"format\" is missing");
  const auto steps = int_field(*json, "steps", 0, int64_t{1} << 31, -1);
  const auto parameters = int_field(*json, "parameters", 1, int64_t{1} << 48, -1);
  const auto schedule = int_field(*json, "schedule_steps", 0, int64_t{1} << 31, 0);
  const auto model = hex_field(*json, "model");
  const auto data = hex_field(*json, "data");
  const auto seed = hex_field(*json, "seed");
  for (const absl::Status& status : {steps.status(), parameters.status(), schedule.status(),
                                     model.status(), data.status(), seed.status()}) {
    if (!status.ok()) return status;
  }
  manifest.steps = *steps;
  manifest.parameters = static_cast<uint64_t>(*parameters);
  manifest.schedule_steps = *schedule;
  manifest.identity = {*model, *data, *seed};
  const nlohmann::json& shards = member(*json, "shards");
  if (!shards.is_array() || shards.empty() || shards.size() > kMaxShards) {
    return absl::InvalidArgumentError("\"shards\" must be a list of 1 to 65536 shards");
  }
  for (const nlohmann::json& shard : shards) {
    const auto bytes = int_field(shard, "bytes", 1, int64_t{1} << 48, 0);
    if (!bytes.ok()) return bytes.status();
    const auto sum = hex_field(shard, "xxh3");
    if (!sum.ok()) return sum.status();
    manifest.shards.push_back({static_cast<uint64_t>(*bytes), *sum});
  }
  return manifest;
}

// Other runs' shards and temporary files, left in this directory by a crash.
void remove_strangers(const CheckpointManifest& manifest) {
  std::set<std::string> ours = {"manifest.json"};
  const auto shards = static_cast<int64_t>(manifest.shards.size());
  for (int64_t i = 0; i < shards; ++i) ours.insert(shard_name(i, shards));
  std::error_code error;
  std::vector<fs::path> strangers;
  for (fs::directory_iterator it(manifest.path, error), end; !error && it != end;
       it.increment(error)) {
    if (!ours.contains(it->path().filename().string())) strangers.push_back(it->path());
  }
  for (const fs::path& path : strangers) fs::remove(path, error);
}

}  // namespace

RunIdentity identity_of(const ModelConfig& model, absl::Span<const int32_t> tokens, uint64_t seed) {
  return {checksum(model_config_to_json(model)),
          XXH3_64bits(tokens.data(), tokens.size() * sizeof(int32_t)), seed};
}

std::string checkpoint_path(const std::string& directory, int64_t steps) {
  return absl::StrFormat("%s/%s%08d", directory, std::string(kStepPrefix), steps);
}

absl::StatusOr<ShardSeal> write_shard(const std::string& directory, const ShardState& state,
                                      int rank, int ranks) {
  for (size_t i = 0; i < state.values.size(); ++i) {
    if (std::isfinite(state.values[i])) continue;
    return absl::DataLossError(absl::StrFormat(
        "the state after %d steps is not saved: rank %d holds numbers that are not finite. The "
        "checkpoints in %s stay as they are: resume from them",
        state.steps, rank, directory));
  }
  const std::string checkpoint = part_of_checkpoint(checkpoint_path(directory, state.steps));
  if (absl::Status status = make_directories(checkpoint); !status.ok()) return status;
  const std::string path = absl::StrCat(checkpoint, "/", shard_name(rank, ranks));
  const size_t owned = state.owned();
  std::vector<TensorToWrite> tensors;
  for (size_t i = 0; i < 3; ++i) {
    tensors.push_back({kTensors[i],
                       TensorType::kF32,
                       {owned},
                       std::as_bytes(std::span(state.values.data() + i * owned, owned))});
  }
  absl::Status status = write_safetensors(
      path, tensors,
      {{"pieces", encode_pieces(state.pieces)}, {"steps", absl::StrCat(state.steps)}});
  if (!status.ok()) return status;
  // Check what a reader will see.
  absl::StatusOr<std::string> bytes = read_file(path, kMaxShardBytes);
  if (!bytes.ok()) return bytes.status();
  return ShardSeal{bytes->size(), checksum(*bytes)};
}

absl::Status finish_checkpoint(const std::string& directory, const CheckpointManifest& manifest,
                               int keep) {
  CheckpointManifest placed = manifest;
  const std::string checkpoint = checkpoint_path(directory, manifest.steps);
  placed.path = part_of_checkpoint(checkpoint);
  nlohmann::ordered_json json = {{"format", kFormat},
                                 {"steps", manifest.steps},
                                 {"parameters", manifest.parameters},
                                 {"schedule_steps", manifest.schedule_steps},
                                 {"model", hex(manifest.identity.model)},
                                 {"data", hex(manifest.identity.data)},
                                 {"seed", hex(manifest.identity.seed)},
                                 {"shards", nlohmann::ordered_json::array()}};
  const auto shards = static_cast<int64_t>(manifest.shards.size());
  for (int64_t i = 0; i < shards; ++i) {
    json["shards"].push_back({{"file", shard_name(i, shards)},
                              {"bytes", manifest.shards[i].bytes},
                              {"xxh3", hex(manifest.shards[i].checksum)}});
  }
  remove_strangers(placed);
  absl::Status status = write_file_atomically(manifest_path(placed.path), json.dump(1) + "\n");
  if (!status.ok()) return status;
  if (status = commit(directory, checkpoint); !status.ok()) return status;
  auto all = places_in(directory);
  int complete = 0;
  for (auto it = all.rbegin(); it != all.rend(); ++it) {
    const bool further = it->steps > manifest.steps;  // of a run that was taken back
    if (further && it->suffix != kRemoved) continue;
    if (is_complete(*it) && ++complete <= keep) continue;
    remove_checkpoint(it->path);
  }
  return absl::OkStatus();
}

absl::Status has_checkpoint(const std::string& directory) { return newest_in(directory).status(); }

absl::StatusOr<CheckpointManifest> find_checkpoint(const std::string& directory,
                                                   const RunIdentity& identity,
                                                   uint64_t parameters) {
  const absl::StatusOr<std::string> found = newest_in(directory);
  if (!found.ok()) return found.status();
  const std::string& newest = *found;
  absl::StatusOr<std::string> text = read_file(manifest_path(newest), size_t{64} << 20);
  if (!text.ok()) return text.status();
  absl::StatusOr<CheckpointManifest> manifest = parse_manifest(newest, *text);
  if (!manifest.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(manifest_path(newest), " is damaged: ", manifest.status().message(),
                     ". Remove ", newest, " to resume from the checkpoint before it"));
  }
  if (manifest->identity.model != identity.model || manifest->parameters != parameters) {
    return absl::InvalidArgumentError(
        absl::StrCat(newest, " is of another model (", manifest->parameters, " parameters, here ",
                     parameters, "): resume with the preset that it was trained with"));
  }
  if (manifest->identity.data != identity.data) {
    return absl::InvalidArgumentError(absl::StrCat(
        newest, " was trained on another text: resume with the --data that it began with"));
  }
  if (manifest->identity.seed != identity.seed) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s was trained with --seed %u, not %u", newest, manifest->identity.seed, identity.seed));
  }
  return manifest;
}

absl::StatusOr<ShardState> read_shard(const CheckpointManifest& manifest, int shard) {
  const ShardSeal& seal = manifest.shards[static_cast<size_t>(shard)];
  const std::string path = absl::StrCat(
      manifest.path, "/", shard_name(shard, static_cast<int64_t>(manifest.shards.size())));
  const auto lost = [&](const std::string& what) {
    return absl::DataLossError(absl::StrCat(path, " ", what, ". Put the file back, or remove ",
                                            manifest.path,
                                            " to resume from the checkpoint before it"));
  };
  absl::StatusOr<std::string> bytes = read_file(path, kMaxShardBytes);
  if (!bytes.ok()) return lost(absl::StrCat("cannot be read: ", bytes.status().message()));
  if (bytes->size() != seal.bytes) {
    return lost(absl::StrFormat("has %u bytes, its manifest says %u", bytes->size(), seal.bytes));
  }
  if (checksum(*bytes) != seal.checksum) {
    return lost(absl::StrFormat("is damaged: its XXH3 is %s, its manifest says %s",
                                hex(checksum(*bytes)), hex(seal.checksum)));
  }
  absl::StatusOr<ShardState> state = parse_shard(*bytes);
  if (!state.ok()) return lost(absl::StrCat("cannot be used: ", state.status().message()));
  if (state->steps != manifest.steps) {
    return lost(
        absl::StrFormat("is of step %d, its manifest of step %d", state->steps, manifest.steps));
  }
  return state;
}

}  // namespace baton::engine::train
