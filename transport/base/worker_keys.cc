// The kernel's random bytes, else OpenSSL's; key pairs of this process's workers, by uid.
#include "transport/base/worker_keys.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/rand.h>
#include <openssl/sha.h>
#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <new>

#include "transport/base/threads/forks.h"

namespace baton::base {
namespace {

// A program may end while threads of its workers and agents still meet peers: they would crash in
// an OpenSSL that was cleaned up at exit. Without effect in a program that has used it before.
[[maybe_unused]] const int kOpenSslStays = OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);

struct Secrets {
  std::mutex mutex;
  std::map<UidBytes, WorkerSecret> by_uid;
};

Secrets& secrets() {
  static auto* const all = new Secrets;  // workers may end after static objects
  return *all;
}

bool fill_by_kernel(unsigned char* out, size_t bytes) {
  while (bytes > 0) {
    const ssize_t got = getrandom(out, bytes, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    out += got;
    bytes -= static_cast<size_t>(got);
  }
  return true;
}

}  // namespace

void fill_with_secret(void* out, size_t bytes) {
  auto* const to = static_cast<unsigned char*>(out);
  // OpenSSL last: it has locks for this, and one that another thread holds stays locked in a forked
  // child.
  if (fill_by_kernel(to, bytes) || RAND_bytes(to, static_cast<int>(bytes)) == 1) return;
  std::fputs(
      "baton: neither OpenSSL nor the kernel has random bytes for a key: allow getrandom(2), or "
      "give the process /dev/urandom\n",
      stderr);
  std::abort();
}

UidBytes uid_of(const std::array<uint8_t, 32>& public_key) {
  std::array<uint8_t, 32> digest{};
  SHA256(public_key.data(), public_key.size(), digest.data());
  UidBytes uid;
  std::copy_n(digest.begin(), uid.size(), uid.begin());
  return uid;
}

UidBytes make_worker_secret() {
  WorkerSecret made;
  fill_with_secret(made.private_key.data(), made.private_key.size());
  EVP_PKEY* const pair = EVP_PKEY_new_raw_private_key(
      EVP_PKEY_X25519, nullptr, made.private_key.data(), made.private_key.size());
  if (pair == nullptr) throw std::bad_alloc();  // any 32 bytes are a key
  size_t bytes = made.public_key.size();
  EVP_PKEY_get_raw_public_key(pair, made.public_key.data(), &bytes);
  EVP_PKEY_free(pair);
  const UidBytes uid = uid_of(made.public_key);
  Secrets& all = secrets();
  const ForkWaits fork_waits(ForkWaits::kMoment);
  const std::lock_guard lock(all.mutex);
  all.by_uid[uid] = made;
  return uid;
}

std::optional<WorkerSecret> worker_secret(const UidBytes& uid) {
  Secrets& all = secrets();
  const ForkWaits fork_waits(ForkWaits::kMoment);
  const std::lock_guard lock(all.mutex);
  const auto found = all.by_uid.find(uid);
  if (found == all.by_uid.end()) return std::nullopt;
  return found->second;
}

}  // namespace baton::base
