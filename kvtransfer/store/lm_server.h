// LMCache's remote connector, `lm://host:port`, answered from a store's memory.
//
//   auto server = LmServer::start({.port = 65432}, store->arena());
//
// The wire has no authentication and no encryption: whoever reaches the port reads and writes all
// values. It listens on loopback unless told otherwise. What it has in common with Baton's own
// records is the memory; names of one are never names of the other.
//
// One thread serves all connections. A stranger costs a descriptor for at most 20 seconds; one who
// sends or takes a value slower than a MiB a second (and 20 seconds) is closed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "kvtransfer/store/block_arena.h"
#include "transport/clock.h"

namespace baton::kvtransfer::store {

// One client of the `lm://` wire, without its socket: bytes in, bytes out.
//
//   while (session.wants_bytes()) { n = recv(fd, session.room()); session.filled(n); }
//   while (!session.to_send().empty()) session.sent(send(fd, session.to_send()));
//
// A value comes straight into the arena and leaves from there. What there is no room for is read
// and thrown away, for a PUT has no reply; a client cannot tell that from an eviction.

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

// Totals of all sessions of a server; only its thread changes them.
struct LmTotals {
  uint64_t puts = 0;
  uint64_t gets = 0;
  uint64_t hits = 0;
  uint64_t dropped = 0;  // values that there was no room for
  uint64_t corrupt = 0;  // values that were not what was put any more: not given out
  uint64_t broken = 0;   // connections that broke the protocol
  size_t arriving = 0;   // bytes of values that are on their way
};

class LmSession {
 public:
  LmSession(BlockArena& arena, LmTotals& totals) : arena_(arena), totals_(totals) {}
  ~LmSession() { end_value(); }
  LmSession(const LmSession&) = delete;
  LmSession& operator=(const LmSession&) = delete;

  // It broke the protocol: close the connection.
  bool broken() const { return broken_; }
  // No request is half here, and no reply half sent.
  bool idle() const { return have_ == 0 && !in_value_ && to_send().empty(); }
  bool has_spoken() const { return spoken_; }  // at least one whole request

  // Requests are taken one at a time: none while a reply is being sent.
  bool wants_bytes() const { return !broken_ && to_send().empty(); }
  std::span<std::byte> room();
  void filled(size_t bytes, Time now);

  std::span<const std::byte> to_send() const;
  void sent(size_t bytes);

  // What it is at: another number for each request, value and reply.
  uint64_t turn() const { return turn_; }
  // How long that may take: a value has longer.
  Time allowance() const;

 private:
  void take_request(Time now);
  void begin_value(Time now);
  void end_value();
  void keep_value();
  void reply(LmCode code, int32_t length, const LmMeta& meta);
  void get();
  void list();

  BlockArena& arena_;
  LmTotals& totals_;
  bool broken_ = false;
  bool spoken_ = false;
  uint64_t turn_ = 0;
  size_t turn_bytes_ = 0;
  std::array<std::byte, kLmRequest> header_{};
  size_t have_ = 0;  // bytes of the header
  LmRequest request_;
  // A value on its way in: into `incoming_`, or nowhere.
  bool in_value_ = false;
  size_t expected_ = 0, arrived_ = 0;
  BlockArena::SpacePtr incoming_;
  // A reply on its way out: the head, then what follows it.
  std::array<std::byte, kLmReply> head_{};
  size_t head_left_ = 0;
  BlockArena::SpacePtr outgoing_;
  std::string text_;
  std::span<const std::byte> body_;
};

struct LmServerOptions {
  std::string host = "127.0.0.1";  // as WorkerOptions::listen_host
  uint16_t port = 0;               // 0: any
  size_t connections = 1024;       // at most; then one that has never spoken goes for a newcomer
};

struct LmServerStats {
  LmTotals totals;
  size_t connections = 0;
  uint64_t turned_away = 0;
  uint64_t too_slow = 0;
};

class LmServer {
 public:
  // The arena must outlive the server. What the system says where the port cannot be had.
  static absl::StatusOr<std::unique_ptr<LmServer>> start(const LmServerOptions& options,
                                                         BlockArena& arena);
  virtual ~LmServer() = default;
  virtual uint16_t port() const = 0;
  virtual LmServerStats stats() const = 0;
};

}  // namespace baton::kvtransfer::store
