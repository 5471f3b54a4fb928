// Handles: 96 bytes that say which process an endpoint lives in and where it answers.
#include <arpa/inet.h>
#include <unistd.h>

#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "collectives/internal/endpoint_impl.h"
#include "collectives/rendezvous.h"
#include "transport/address.h"
#include "transport/net/endpoint.h"

namespace baton::collectives::internal {

namespace {

constexpr std::array<char, 3> kMagic = {'B', 'H', 'n'};
constexpr std::string_view kShmPrefix = "baton-";  // and 32 hexadecimal digits

enum Provider : uint32_t { kShm = 1, kTcp = 2, kVerbs = 4, kUcx = 8, kSim = 16, kOther = 32 };

// As it lies in the 96 bytes; numbers are little-endian.
struct Fields {
  std::array<char, 3> magic;
  uint8_t version;
  uint8_t uid[16];
  uint8_t host[8];      // a hash: equal where shared memory works
  uint8_t local[16];    // of shm's name; of the simulated fabric: the node
  uint8_t address[16];  // IPv6, or IPv4 mapped into it; of the listener with `port`
  uint16_t port;        // 0: none
  uint16_t unused;
  uint32_t providers;
  uint32_t pid;
  char name[20];  // of the host, cut short, for people
  uint32_t check;
};
static_assert(sizeof(Fields) == Handle::kBytes);

uint64_t hash_of(std::string_view bytes) {
  uint64_t hash = 14695981039346656037u;
  for (const char byte : bytes) {
    hash ^= static_cast<unsigned char>(byte);
    hash *= 1099511628211u;
  }
  return hash ^ hash >> 29;
}

uint32_t check_of(const std::array<char, Handle::kBytes>& bytes) {
  return static_cast<uint32_t>(hash_of({bytes.data(), offsetof(Fields, check)}));
}

Fields fields_of(const Handle& handle) {
  Fields fields;
  std::memcpy(&fields, EndpointImpl::bytes_of(handle).data(), sizeof fields);
  return fields;
}

void set_address(Fields& fields, const std::string& where) {
  const auto found = net::literal(where.substr(0, where.find(',')));
  if (!found.ok() || found->empty()) return;
  const net::Endpoint& at = found->front();
  fields.port = at.port();
  if (at.storage.ss_family == AF_INET) {
    fields.address[10] = fields.address[11] = 0xff;
    std::memcpy(fields.address + 12, &reinterpret_cast<const sockaddr_in&>(at.storage).sin_addr, 4);
  } else {
    std::memcpy(fields.address, &reinterpret_cast<const sockaddr_in6&>(at.storage).sin6_addr, 16);
  }
}

std::string host_port_of(const Fields& fields) {
  if (fields.port == 0) return "";
  char text[INET6_ADDRSTRLEN] = "";
  static constexpr uint8_t kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  if (std::memcmp(fields.address, kMapped, sizeof kMapped) == 0) {
    inet_ntop(AF_INET, fields.address + 12, text, sizeof text);
    return absl::StrCat(text, ":", fields.port);
  }
  inet_ntop(AF_INET6, fields.address, text, sizeof text);
  return absl::StrCat("[", text, "]:", fields.port);
}

uint64_t this_host() { return hash_of(this_host_id()); }

Fields fields_for(const Worker& worker) {
  Fields fields{};
  fields.magic = kMagic;
  fields.version = static_cast<uint8_t>(kCollectivesVersion);
  fields.pid = static_cast<uint32_t>(getpid());
  const std::string name = host_name();
  std::memcpy(fields.name, name.data(), std::min(name.size(), sizeof fields.name));
  const uint64_t host = this_host();
  std::memcpy(fields.host, &host, sizeof host);
  if (const auto address = Address::decode(worker.address()); address.ok()) {
    std::memcpy(fields.uid, address->uid.bytes.data(), sizeof fields.uid);
    const std::string port = absl::StrCat(":", worker.port());
    for (const auto& [provider, where] : address->providers) {
      if (provider == "shm" && where.starts_with(kShmPrefix)) {
        const std::string local = absl::HexStringToBytes(where.substr(kShmPrefix.size()));
        if (local.size() != sizeof fields.local) continue;
        std::memcpy(fields.local, local.data(), sizeof fields.local);
        fields.providers |= kShm;
      } else if (provider == "sim") {
        const uint64_t node = std::strtoull(where.c_str(), nullptr, 10);
        std::memcpy(fields.local, &node, sizeof node);
        fields.providers |= kSim;
      } else {
        fields.providers |= provider == "tcp"     ? kTcp
                            : provider == "verbs" ? kVerbs
                            : provider == "ucx"   ? kUcx
                                                  : kOther;
        const std::string first = where.substr(0, where.find(','));
        if (worker.port() != 0 && first.ends_with(port)) set_address(fields, first);
      }
    }
  }
  return fields;
}

// An encoded address where nothing has to be asked for, else "host:port"; empty: there is no way.
std::string address_of(const Handle& handle) {
  const Fields fields = fields_of(handle);
  const uint64_t host = this_host();
  const bool same_host = std::memcmp(fields.host, &host, sizeof host) == 0;
  const std::string host_port = host_port_of(fields);
  Address address;
  std::memcpy(address.uid.bytes.data(), fields.uid, sizeof fields.uid);
  address.name = handle.label().substr(0, 60);
  address.host_id = same_host ? this_host_id() : "another";
  if (fields.providers & kSim) {
    uint64_t node = 0;
    std::memcpy(&node, fields.local, sizeof node);
    address.providers.emplace_back("sim", absl::StrCat(node));
    return address.encode();
  }
  if (!same_host || (fields.providers & (kVerbs | kUcx | kOther))) return host_port;
  if (fields.providers & kShm) {
    const std::string local(reinterpret_cast<const char*>(fields.local), sizeof fields.local);
    address.providers.emplace_back("shm", std::string(kShmPrefix) + absl::BytesToHexString(local));
  }
  if ((fields.providers & kTcp) && !host_port.empty()) {
    address.providers.emplace_back("tcp", host_port);
  }
  return address.providers.empty() ? "" : address.encode();
}

}  // namespace

std::string host_name() {
  char name[256] = "";
  if (gethostname(name, sizeof name - 1) != 0) return "unknown";
  return name;
}

std::string EndpointImpl::host_of(const Handle& handle) {
  const Fields fields = fields_of(handle);
  return {reinterpret_cast<const char*>(fields.host), sizeof fields.host};
}

std::string EndpointImpl::host_name_of(const Handle& handle) {
  const Fields fields = fields_of(handle);
  return {fields.name, strnlen(fields.name, sizeof fields.name)};
}

uint32_t EndpointImpl::pid_of(const Handle& handle) { return fields_of(handle).pid; }

bool EndpointImpl::maps_memory(const Handle& handle) const {
  const Fields theirs = fields_of(handle);
  const Fields ours = fields_of(handle_);
  return std::memcmp(theirs.host, ours.host, sizeof ours.host) == 0 &&
         (theirs.providers & ours.providers & kShm) != 0;
}

absl::Status EndpointImpl::check(const Handle& handle) {
  const Fields fields = fields_of(handle);
  if (fields.magic != kMagic || fields.check != check_of(handle.bytes_)) {
    return absl::InvalidArgumentError(
        "not a handle of an endpoint: expected the 96 bytes that Handle::bytes() gave");
  }
  if (fields.version != kCollectivesVersion) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "the handle of %s is of version %u of the collectives, this process speaks %u: install "
        "the same Baton everywhere",
        handle.label(), fields.version, kCollectivesVersion));
  }
  return absl::OkStatus();
}

}  // namespace baton::collectives::internal

namespace baton {

namespace inside = collectives::internal;
using inside::EndpointImpl;

Handle Handle::of(const Worker& worker) {
  inside::Fields fields = inside::fields_for(worker);
  Handle handle;
  std::memcpy(handle.bytes_.data(), &fields, sizeof fields);
  fields.check = inside::check_of(handle.bytes_);
  std::memcpy(handle.bytes_.data(), &fields, sizeof fields);
  return handle;
}

std::string Handle::address() const { return inside::address_of(*this); }

WorkerUid Handle::uid() const {
  WorkerUid uid;
  std::memcpy(uid.bytes.data(), inside::fields_of(*this).uid, uid.bytes.size());
  return uid;
}

absl::StatusOr<Handle> Handle::decode(std::string_view bytes) {
  if (bytes.size() != kBytes) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "not a handle of an endpoint: %u bytes instead of %u", bytes.size(), kBytes));
  }
  Handle handle;
  std::copy(bytes.begin(), bytes.end(), handle.bytes_.begin());
  if (absl::Status status = EndpointImpl::check(handle); !status.ok()) return status;
  return handle;
}

std::string Handle::label() const {
  return absl::StrFormat("%s, pid %u", EndpointImpl::host_name_of(*this),
                         EndpointImpl::pid_of(*this));
}

}  // namespace baton
