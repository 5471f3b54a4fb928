// Key pairs of this process's workers, by uid.
#include "transport/base/worker_secret.h"

#include <openssl/evp.h>
#include <openssl/rand.h>
#include <openssl/sha.h>

#include <algorithm>
#include <map>
#include <mutex>

namespace baton::base {
namespace {

struct Secrets {
  std::mutex mutex;
  std::map<UidBytes, WorkerSecret> by_uid;
};

Secrets& secrets() {
  static auto* const all = new Secrets;  // workers may end after static objects
  return *all;
}

}  // namespace

UidBytes uid_of(const std::array<uint8_t, 32>& public_key) {
  std::array<uint8_t, 32> digest{};
  SHA256(public_key.data(), public_key.size(), digest.data());
  UidBytes uid;
  std::copy_n(digest.begin(), uid.size(), uid.begin());
  return uid;
}

UidBytes make_worker_secret() {
  WorkerSecret made;
  RAND_bytes(made.private_key.data(), static_cast<int>(made.private_key.size()));
  EVP_PKEY* const pair = EVP_PKEY_new_raw_private_key(
      EVP_PKEY_X25519, nullptr, made.private_key.data(), made.private_key.size());
  size_t bytes = made.public_key.size();
  EVP_PKEY_get_raw_public_key(pair, made.public_key.data(), &bytes);
  EVP_PKEY_free(pair);
  const UidBytes uid = uid_of(made.public_key);
  Secrets& all = secrets();
  const std::lock_guard lock(all.mutex);
  all.by_uid[uid] = made;
  return uid;
}

std::optional<WorkerSecret> worker_secret(const UidBytes& uid) {
  Secrets& all = secrets();
  const std::lock_guard lock(all.mutex);
  const auto found = all.by_uid.find(uid);
  if (found == all.by_uid.end()) return std::nullopt;
  return found->second;
}

}  // namespace baton::base
