// Fingerprints on OpenSSL's SHA-256: fields with their lengths before them, so that none runs into
// the next.
#include "kvtransfer/tiers/tier_key.h"

#include <openssl/sha.h>

#include "transport/base/threads/forks.h"

namespace baton::kvtransfer::tiers {
namespace {

void append(std::string_view field, std::string* out) {
  const uint64_t size = field.size();
  out->append(reinterpret_cast<const char*>(&size), sizeof(size));
  out->append(field);
}

TierKey digest(const std::string& text) {
  const base::ForkWaits fork_waits(base::ForkWaits::kMoment);  // OpenSSL has locks
  TierKey key;
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), key.bytes.data());
  return key;
}

}  // namespace

TierKeys::TierKeys(const TierIdentity& identity) {
  std::string text;
  append("baton kv tier 1", &text);
  for (const std::string* field :
       {&identity.weights, &identity.tokenizer, &identity.dtype, &identity.layout, &identity.shard,
        &identity.adapter, &identity.salt}) {
    append(*field, &text);
  }
  identity_ = digest(text);
}

TierKey TierKeys::key(std::string_view chained) const {
  std::string text(reinterpret_cast<const char*>(identity_.bytes.data()), identity_.bytes.size());
  append(chained, &text);
  return digest(text);
}

}  // namespace baton::kvtransfer::tiers
