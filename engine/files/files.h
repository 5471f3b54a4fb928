// Whole files in and out: read with a size limit, write atomically.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace baton::engine {

// Reads a regular file. NotFound, PermissionDenied or ResourceExhausted (larger than `max_bytes`).
absl::StatusOr<std::string> read_file(const std::string& path, size_t max_bytes = size_t{1} << 30);

// Writes the pieces to a temporary file in the same directory, fsyncs, renames it over `path`.
// On failure nothing is left behind and the old file stays.
absl::Status write_file_atomically(const std::string& path,
                                   std::span<const std::string_view> pieces);
absl::Status write_file_atomically(const std::string& path, std::string_view bytes);

// Makes what was created and renamed in the directory outlast a crash of the machine.
absl::Status sync_directory(const std::string& path);

// mkdir -p.
absl::Status make_directories(const std::string& path);

}  // namespace baton::engine
