// Metadata records over plain HTTP, and finding out whether their writers are alive.
#include "kvtransfer/metadata/http_store.h"

#include <random>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"

namespace baton::kvtransfer {
namespace {

constexpr int64_t kMaxLease = 86'400'000;

std::string random_name() {
  std::random_device random;
  return absl::StrFormat("%08x%08x", random(), random());
}

absl::Status odd(const std::string& where, int status) {
  return absl::UnavailableError(absl::StrFormat(
      "%s answers %d: it must take GET, PUT and DELETE of names below it", where, status));
}

}  // namespace

HttpStore::HttpStore(std::string host, std::string port, std::string path,
                     std::chrono::milliseconds lease)
    : client_(std::move(host), std::move(port)),
      path_(std::move(path)),
      lease_(lease),
      owner_(random_name()) {}

absl::StatusOr<std::optional<HttpStore::Record>> HttpStore::look(const std::string& key) {
  absl::StatusOr<HttpReply> reply = client_.request("GET", path_ + "/" + key, {});
  if (!reply.ok()) return reply.status();
  if (reply->status == 404 || reply->status == 410) return std::nullopt;
  if (reply->status != 200) return odd(name(), reply->status);
  const size_t line = reply->body.find('\n');
  const std::vector<std::string> words = absl::StrSplit(reply->body.substr(0, line), ' ');
  Record out;
  int64_t lease = 0;
  if (line == std::string::npos || words.size() != 4 || words[0] != "BATON1" ||
      !absl::SimpleAtoi(words[2], &out.beat) || !absl::SimpleAtoi(words[3], &lease) || lease <= 0 ||
      lease > kMaxLease) {
    return absl::DataLossError(absl::StrCat(name(), "/", key, " was not written by an agent"));
  }
  out.owner = words[1];
  out.lease = std::chrono::milliseconds(lease);
  out.bytes = reply->body.substr(line + 1);
  return out;
}

bool HttpStore::alive(const std::string& key, const Record& record) {
  if (record.owner == owner_) return true;
  Seen& seen = seen_[key];
  if (seen.owner != record.owner || seen.beat != record.beat) {
    seen = {record.owner, record.beat, Clock::now()};
  }
  return Clock::now() - seen.since < record.lease;
}

absl::Status HttpStore::anothers(const std::string& key) const {
  return absl::AlreadyExistsError(absl::StrCat("another live agent has ", name(), "/", key));
}

absl::Status HttpStore::write(const std::string& key) {
  const std::string record =
      absl::StrCat("BATON1", " ", owner_, " ", ++beat_, " ", lease_.count(), "\n", ours_.at(key));
  const absl::StatusOr<HttpReply> reply = client_.request(
      "PUT", path_ + "/" + key, record, {{"Content-Type", "application/octet-stream"}});
  if (!reply.ok()) return reply.status();
  return reply->status / 100 == 2 ? absl::OkStatus() : odd(name(), reply->status);
}

absl::Status HttpStore::put(const std::string& key, std::string_view bytes) {
  const absl::StatusOr<std::optional<Record>> there = look(key);
  // What is no record is replaced.
  if (!there.ok() && !absl::IsDataLoss(there.status())) return there.status();
  if (there.ok() && *there && (*there)->owner != owner_ && alive(key, **there)) {
    ours_.erase(key);
    return anothers(key);
  }
  ours_[key] = bytes;
  if (absl::Status written = write(key); !written.ok()) return written;
  // If two put at the same time, the first finds the second's record.
  const absl::StatusOr<std::optional<Record>> now = look(key);
  if (!now.ok()) return now.status();
  if (*now && (*now)->owner == owner_) return absl::OkStatus();
  ours_.erase(key);
  return *now ? anothers(key) : absl::UnavailableError(name() + " does not keep what is put there");
}

absl::Status HttpStore::remove(const std::string& key) {
  if (ours_.erase(key) == 0) return absl::OkStatus();
  const absl::StatusOr<std::optional<Record>> there = look(key);
  if (!there.ok() || !*there || (*there)->owner != owner_) return there.status();
  return client_.request("DELETE", path_ + "/" + key, {}).status();
}

absl::Status HttpStore::renew() {
  for (const auto& [key, bytes] : ours_) {
    const absl::StatusOr<std::optional<Record>> there = look(key);
    if (!there.ok()) return there.status();
    if (!*there) return absl::NotFoundError(absl::StrCat(name(), "/", key, " was removed"));
    if ((*there)->owner != owner_) return anothers(key);
    if (absl::Status written = write(key); !written.ok()) return written;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> HttpStore::get(const std::string& key) {
  absl::StatusOr<std::optional<Record>> there = look(key);
  if (!there.ok()) return there.status();
  if (!*there) return absl::NotFoundError(absl::StrCat(name(), "/", key, " is not there"));
  if (!alive(key, **there)) {
    return absl::NotFoundError(
        absl::StrCat("the lease of ", name(), "/", key, " ran out: its owner stopped renewing it"));
  }
  return std::move((*there)->bytes);
}

}  // namespace baton::kvtransfer
