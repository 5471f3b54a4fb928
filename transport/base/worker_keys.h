// Random bytes for keys, and the key pair behind a worker's uid: the holder of the private key
// proves that the uid is its own.
//
// A uid is the beginning of the SHA-256 of a public key (X25519, RFC 7748) that is made with it. A
// worker that introduces itself shows the public key and must know the private one; the private one
// never leaves the process. So no process can claim another worker's uid, whatever else it knows.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace baton::base {

// Fills `bytes` bytes at `out`: by the kernel, or where that cannot, as in a sandbox without that
// call, by OpenSSL. Where neither has any the process ends: a worker whose keys can
// be guessed is open to all, and no user would notice.
void fill_with_secret(void* out, size_t bytes);

using UidBytes = std::array<uint8_t, 16>;

struct WorkerSecret {
  std::array<uint8_t, 32> public_key{};
  std::array<uint8_t, 32> private_key{};
};

// A new key pair, kept for as long as the process lives (about 100 bytes); returns its uid. Any
// thread, as the others. std::bad_alloc where there is no memory for it.
UidBytes make_worker_secret();
// Nothing: the uid was not made in this process.
std::optional<WorkerSecret> worker_secret(const UidBytes& uid);
UidBytes uid_of(const std::array<uint8_t, 32>& public_key);

}  // namespace baton::base
