// Which store a URL names.
#include "kvtransfer/metadata/metadata_store.h"

#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "kvtransfer/metadata/etcd_store.h"
#include "kvtransfer/metadata/file_store.h"
#include "kvtransfer/metadata/http_store.h"

namespace baton::kvtransfer {
namespace {

absl::Status bad_url(std::string_view url, std::string_view why) {
  return absl::InvalidArgumentError(absl::StrFormat(
      "metadata store \"%s\": %s; there are etcd://HOST:PORT/PREFIX, http://HOST:PORT/PATH and "
      "file:///FOLDER",
      url, why));
}

// "host", "host:port", "[::1]:port".
bool split(std::string_view text, std::string_view default_port, std::string& host,
           std::string& port) {
  const size_t colon = text.rfind(':');
  const size_t bracket = text.rfind(']');
  const bool has_port =
      colon != std::string_view::npos && (bracket == std::string_view::npos || colon > bracket);
  host = std::string(text.substr(0, has_port ? colon : text.size()));
  port = std::string(has_port ? text.substr(colon + 1) : default_port);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  uint32_t number = 0;
  return !host.empty() && absl::SimpleAtoi(port, &number) && number > 0 && number < 65536;
}

}  // namespace

absl::StatusOr<std::unique_ptr<MetadataStore>> make_metadata_store(
    std::string_view url, std::chrono::milliseconds lease) {
  if (lease < kMinMetadataLease || lease > std::chrono::hours(24)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("a lease of %d ms for metadata: it is 1 s to 24 h", lease.count()));
  }
  std::string_view rest = url;
  const auto consume = [&rest](std::string_view scheme) {
    const bool is = rest.substr(0, scheme.size()) == scheme;
    if (is) rest.remove_prefix(scheme.size());
    return is;
  };
  if (consume("file://")) {
    while (rest.size() > 1 && rest.back() == '/') rest.remove_suffix(1);
    if (rest.empty() || rest[0] != '/') return bad_url(url, "the folder begins with /");
    if (absl::Status there = FileStore::check(std::string(rest)); !there.ok()) return there;
    return std::make_unique<FileStore>(std::string(rest));
  }
  const bool etcd = consume("etcd://");
  if (!etcd && !consume("http://")) return bad_url(url, "no such kind of store");
  const size_t slash = std::min(rest.find('/'), rest.size());
  std::string path(rest.substr(slash));
  while (!path.empty() && path.back() == '/') path.pop_back();
  EtcdStore::Endpoints where;
  const std::vector<std::string> hosts = absl::StrSplit(std::string(rest.substr(0, slash)), ',');
  for (const std::string& one : hosts) {
    auto& [host, port] = where.emplace_back();
    if (!split(one, etcd ? "2379" : "80", host, port)) return bad_url(url, "no host and port");
  }
  if (etcd) {
    return std::make_unique<EtcdStore>(std::move(where), path.empty() ? "/baton" : path, lease);
  }
  if (where.size() != 1) return bad_url(url, "one host");
  return std::make_unique<HttpStore>(where[0].first, where[0].second, path, lease);
}

std::string metadata_key(std::string_view agent, std::string_view label) {
  std::string out;
  const auto add = [&out](std::string_view text) {
    for (const char letter : text) {
      if (absl::ascii_isalnum(static_cast<unsigned char>(letter)) || letter == '-' ||
          letter == '_') {
        out += letter;
      } else {
        absl::StrAppendFormat(&out, "=%02X", static_cast<unsigned char>(letter));
      }
    }
  };
  add(agent);
  if (!label.empty()) {
    out += '.';
    add(label);
  }
  return out;
}

}  // namespace baton::kvtransfer
