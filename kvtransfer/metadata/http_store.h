// An HTTP server as a store: PUT, GET and DELETE of a path for each key. A server like that knows
// no leases: what is put begins with a line that says who put it and how often it was renewed, and
// is taken to be abandoned when that line has stayed as it is for as long as the lease lasts, by
// the reader's clock.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "kvtransfer/metadata/http_client.h"
#include "kvtransfer/metadata/metadata_store.h"

namespace baton::kvtransfer {

class HttpStore : public MetadataStore {
 public:
  HttpStore(std::string host, std::string port, std::string path, std::chrono::milliseconds lease);

  absl::Status put(const std::string& key, std::string_view bytes) override;
  absl::Status remove(const std::string& key) override;
  absl::Status renew() override;
  absl::StatusOr<std::string> get(const std::string& key) override;
  bool watch(Changed) override { return false; }
  bool watching() const override { return false; }
  void stop() override { client_.stop(); }
  std::string name() const override { return "http://" + client_.where() + path_; }

 private:
  using Clock = std::chrono::steady_clock;
  // What stands under a key.
  struct Record {
    std::string owner;
    uint64_t beat = 0;
    std::chrono::milliseconds lease{};
    std::string bytes;
  };
  // What was seen under a key, and since when it has stayed so.
  struct Seen {
    std::string owner;
    uint64_t beat = 0;
    Clock::time_point since;
  };

  absl::StatusOr<std::optional<Record>> look(const std::string& key);
  bool alive(const std::string& key, const Record& record);
  absl::Status write(const std::string& key);
  absl::Status anothers(const std::string& key) const;

  HttpClient client_;
  const std::string path_;
  const std::chrono::milliseconds lease_;
  const std::string owner_;                  // of this lease: a random number
  std::map<std::string, std::string> ours_;  // by key
  std::map<std::string, Seen> seen_;
  uint64_t beat_ = 0;
};

}  // namespace baton::kvtransfer
