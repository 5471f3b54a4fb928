// The wire of LMCache's remote connector `lm://host:port`, as version 0.5.6 speaks it.
//
//   request   9 int32: command, length, format, dtype, location, 4 dimensions; a key of 150 bytes,
//             filled up with blanks; after a PUT `length` bytes
//   reply     9 int32: code, length, format, dtype, 4 dimensions, location; after a GET that found
//             something `length` bytes. A PUT has none.
//
// Numbers are in the byte order of the machine (little endian here). Format, dtype, dimensions and
// location are the client's: they are kept and given back as they came.
//
// Source: LMCache 0.5.6, lmcache/v1/protocol.py and
// lmcache/v1/storage_backend/connector/lm_connector.py.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

namespace baton::kvtransfer::store {

inline constexpr size_t kLmKey = 150;
inline constexpr size_t kLmRequest = 9 * 4 + kLmKey;
inline constexpr size_t kLmReply = 9 * 4;

enum class LmCommand : int32_t { kPut = 1, kGet = 2, kExist = 3, kList = 4, kHealth = 5 };
enum class LmCode : int32_t { kSuccess = 200, kFail = 400 };

struct LmMeta {
  int32_t format = 1;
  int32_t dtype = 2;
  std::array<int32_t, 4> dims{};
  int32_t location = 0;
};

struct LmRequest {
  int32_t command = 0;  // any: see LmCommand
  int32_t length = 0;   // any
  LmMeta meta;
  std::array<char, kLmKey> key_bytes{};
  // Without the blanks.
  std::string_view key() const {
    const std::string_view all(key_bytes.data(), key_bytes.size());
    const size_t last = all.find_last_not_of(' ');
    return all.substr(0, last == std::string_view::npos ? 0 : last + 1);
  }
};

inline LmRequest decode_lm_request(std::span<const std::byte, kLmRequest> bytes) {
  LmRequest request;
  int32_t n[9];
  std::memcpy(n, bytes.data(), sizeof(n));
  request.command = n[0];
  request.length = n[1];
  request.meta = {
      .format = n[2], .dtype = n[3], .dims = {n[5], n[6], n[7], n[8]}, .location = n[4]};
  std::memcpy(request.key_bytes.data(), bytes.data() + sizeof(n), kLmKey);
  return request;
}

inline std::array<std::byte, kLmReply> encode_lm_reply(LmCode code, int32_t length,
                                                       const LmMeta& meta) {
  const int32_t n[9] = {static_cast<int32_t>(code),
                        length,
                        meta.format,
                        meta.dtype,
                        meta.dims[0],
                        meta.dims[1],
                        meta.dims[2],
                        meta.dims[3],
                        meta.location};
  std::array<std::byte, kLmReply> bytes;
  std::memcpy(bytes.data(), n, sizeof(n));
  return bytes;
}

}  // namespace baton::kvtransfer::store
