// Addresses as text, and the identity of this machine.
#include "transport/address.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "transport/base/wire.h"
#include "transport/identity.h"

namespace baton {
namespace {
constexpr std::string_view kTextPrefix = "baton1:";
constexpr size_t kMaxText = 4096;

std::string first_line(const char* path) {
  char buffer[128];
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return "?";
  const ssize_t got = read(fd, buffer, sizeof buffer);
  close(fd);
  if (got <= 0) return "?";
  std::string_view text(buffer, static_cast<size_t>(got));
  return std::string(text.substr(0, text.find('\n')));
}

uint64_t inode_of(const char* path) {
  struct stat info;
  return stat(path, &info) == 0 ? info.st_ino : 0;
}
}  // namespace

std::string Address::encode() const {
  std::string raw(reinterpret_cast<const char*>(uid.bytes.data()), uid.bytes.size());
  base::put_text(raw, name);
  base::put_text(raw, host_id);
  base::put_number(raw, static_cast<uint16_t>(providers.size()));
  for (const auto& [provider, where] : providers) {
    base::put_text(raw, provider);
    base::put_text(raw, where);
  }
  return std::string(kTextPrefix) + absl::WebSafeBase64Escape(raw);
}

absl::StatusOr<Address> Address::decode(std::string_view text) {
  std::string raw;
  if (text.size() > kMaxText || text.substr(0, kTextPrefix.size()) != kTextPrefix ||
      !absl::WebSafeBase64Unescape(std::string(text.substr(kTextPrefix.size())), &raw)) {
    return absl::InvalidArgumentError(
        "not a worker address: expected \"baton1:...\" as another worker printed it, or host:port");
  }
  base::WireReader in(raw);
  Address address;
  const std::string_view uid = in.take(address.uid.bytes.size());
  if (!uid.empty()) std::memcpy(address.uid.bytes.data(), uid.data(), uid.size());
  address.name = in.text(kMaxWorkerName);
  address.host_id = in.text(256);
  const size_t count = in.number<uint16_t>();
  for (size_t i = 0; i < count && !in.failed(); ++i) {
    std::string provider(in.text(32));
    std::string where(in.text(1024));
    address.providers.emplace_back(std::move(provider), std::move(where));
  }
  if (!in.finished()) {
    return absl::InvalidArgumentError("the worker address is cut short or damaged: copy it again");
  }
  return address;
}

std::string this_host_id() {
  return absl::StrCat(first_line("/proc/sys/kernel/random/boot_id"), "/",
                      inode_of("/proc/self/ns/net"), "/", inode_of("/proc/self/ns/pid"), "/",
                      getuid());
}

bool same_network(std::string_view host_id, std::string_view other) {
  const auto network = [](std::string_view id) {
    const size_t machine = id.find('/');
    return machine == std::string_view::npos ? id : id.substr(0, id.find('/', machine + 1));
  };
  return network(host_id) == network(other);
}

}  // namespace baton
