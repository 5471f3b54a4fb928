// safetensors files: a reader over mmap that trusts nothing, and an atomic writer.
//
// Format (huggingface/safetensors README): u64 little-endian header length, JSON header
// {"name": {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {...}}, data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace baton::engine {

enum class TensorType { kF32, kF16, kBf16, kOther };
std::string_view tensor_type_name(TensorType type);

struct TensorInfo {
  std::string name;
  TensorType type = TensorType::kOther;
  std::vector<size_t> shape;
  size_t begin = 0;  // byte range within the file
  size_t end = 0;
  size_t elements() const;
};

struct SafetensorsHeader {
  std::map<std::string, TensorInfo, std::less<>> tensors;
  std::map<std::string, std::string> metadata;
};

// Validates the header of a complete file image: lengths, types, shapes whose product matches the
// byte range, ranges inside the file that neither overlap nor leave holes. InvalidArgument says
// which tensor is wrong and how. Never reads outside `bytes`.
absl::StatusOr<SafetensorsHeader> parse_safetensors(std::string_view bytes);

// An open file. Immutable; any number of threads may read. The file must not be truncated while
// it is open.
class SafetensorsFile {
 public:
  static absl::StatusOr<SafetensorsFile> open(const std::string& path);

  const SafetensorsHeader& header() const { return header_; }
  const std::string& path() const { return path_; }
  // NotFound naming the file and the tensor.
  absl::StatusOr<const TensorInfo*> find(std::string_view name) const;
  // The raw bytes of a tensor of this file; valid while the file object lives.
  std::string_view data(const TensorInfo& info) const;

 private:
  SafetensorsFile() = default;
  std::string path_;
  SafetensorsHeader header_;
  std::shared_ptr<const char> mapping_;
};

struct TensorToWrite {
  std::string name;
  TensorType type = TensorType::kBf16;
  std::vector<size_t> shape;
  std::span<const std::byte> data;
};

// Writes a temporary file beside `path`, syncs it and renames it over `path`: readers see the old
// file or the new one. The header is padded so that data starts at a multiple of 64 bytes.
absl::Status write_safetensors(const std::string& path, std::span<const TensorToWrite> tensors,
                               const std::map<std::string, std::string>& metadata = {});

}  // namespace baton::engine
