// etcd's questions and answers. Numbers of 64 bits are text in them, keys and values base64.
#include "kvtransfer/metadata/etcd_store.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace baton::kvtransfer {
namespace {

using nlohmann::json;

// A watch that says nothing for so long is begun again: its server may be gone.
constexpr std::chrono::seconds kSilence{60};
constexpr std::chrono::milliseconds kRetryPause{500};

std::string base64(const std::string& text) { return absl::Base64Escape(text); }

// A text of an answer; "" where there is none.
std::string text_at(const json& at, const char* field) {
  const auto found = at.find(field);
  return found != at.end() && found->is_string() ? found->get<std::string>() : "";
}

// False where there is none.
bool flag_at(const json& at, const char* field) {
  const auto found = at.find(field);
  return found != at.end() && found->is_boolean() && found->get<bool>();
}

const json& list_at(const json& at, const char* field) {
  static const json kEmpty = json::array();
  const auto found = at.find(field);
  return found != at.end() && found->is_array() ? *found : kEmpty;
}

absl::Status damaged(const std::string& where) {
  return absl::UnavailableError(absl::StrCat(where, " does not speak etcd 3.4's JSON"));
}

}  // namespace

EtcdStore::EtcdStore(Endpoints endpoints, std::string prefix, std::chrono::milliseconds lease)
    : endpoints_(std::move(endpoints)), prefix_(std::move(prefix)), lease_length_(lease) {
  for (const auto& [host, port] : endpoints_) {
    clients_.push_back(std::make_unique<HttpClient>(host, port));
    watchers_.push_back(std::make_unique<HttpClient>(host, port));
  }
}

EtcdStore::~EtcdStore() { stop(); }

void EtcdStore::stop() {
  for (const auto& client : clients_) client->stop();
  for (const auto& watcher : watchers_) watcher->stop();
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (watch_thread_.joinable()) watch_thread_.join();
}

std::string EtcdStore::name() const {
  return absl::StrCat("etcd://", clients_[endpoint_]->where(), prefix_);
}

absl::StatusOr<std::string> EtcdStore::ask(const std::string& what, const std::string& body) {
  absl::Status why;
  for (size_t tried = 0; tried < clients_.size(); ++tried) {
    HttpClient& client = *clients_[endpoint_];
    absl::StatusOr<HttpReply> reply = client.request("POST", "/v3/" + what, body);
    if (reply.ok() && reply->status == 200) return std::move(reply->body);
    if (reply.ok() && reply->status == 404 &&
        reply->body.find("lease not found") != std::string::npos) {
      return absl::NotFoundError("etcd no longer knows the lease");
    }
    why = reply.ok()
              ? absl::UnavailableError(absl::StrCat(client.where(), " answers ", reply->status,
                                                    ": ", reply->body.substr(0, 200)))
              : reply.status();
    if (absl::IsCancelled(why)) return why;
    endpoint_ = (endpoint_ + 1) % clients_.size();
  }
  return why;
}

absl::Status EtcdStore::grant() {
  if (!lease_.empty()) return absl::OkStatus();
  const auto seconds = std::chrono::ceil<std::chrono::seconds>(lease_length_).count();
  const absl::StatusOr<std::string> reply = ask("lease/grant", json{{"TTL", seconds}}.dump());
  if (!reply.ok()) return reply.status();
  lease_ = text_at(json::parse(*reply, nullptr, false), "ID");
  return lease_.empty() ? damaged(name()) : absl::OkStatus();
}

absl::Status EtcdStore::put(const std::string& key, std::string_view bytes) {
  if (absl::Status granted = grant(); !granted.ok()) return granted;
  const std::string whole = base64(absl::StrCat(prefix_, "/", key));
  const json write = {
      {{"request_put",
        {{"key", whole}, {"value", base64(std::string(bytes))}, {"lease", lease_}}}}};
  // Where nothing is; else where ours is.
  const json absent = {{"key", whole}, {"target", "CREATE"}, {"create_revision", "0"}};
  const json ours = {{"key", whole}, {"target", "LEASE"}, {"lease", lease_}};
  for (const json& only_if : {absent, ours}) {
    const absl::StatusOr<std::string> reply =
        ask("kv/txn", json{{"compare", {only_if}}, {"success", write}}.dump());
    if (!reply.ok()) {
      if (absl::IsNotFound(reply.status())) lease_.clear();
      return reply.status();
    }
    const json answer = json::parse(*reply, nullptr, false);
    if (!answer.is_object()) return damaged(name());
    if (flag_at(answer, "succeeded")) return absl::OkStatus();
  }
  return absl::AlreadyExistsError(absl::StrCat("another live agent has ", name(), "/", key));
}

absl::Status EtcdStore::remove(const std::string& key) {
  if (lease_.empty()) return absl::OkStatus();
  const std::string whole = base64(absl::StrCat(prefix_, "/", key));
  const json ours = {{"key", whole}, {"target", "LEASE"}, {"lease", lease_}};
  const json erase = {{{"request_delete_range", {{"key", whole}}}}};
  return ask("kv/txn", json{{"compare", {ours}}, {"success", erase}}.dump()).status();
}

absl::Status EtcdStore::renew() {
  if (lease_.empty()) return absl::NotFoundError("no lease yet");
  const absl::StatusOr<std::string> reply = ask("lease/keepalive", json{{"ID", lease_}}.dump());
  absl::Status out = reply.status();
  if (reply.ok()) {
    const json answer = json::parse(*reply, nullptr, false);
    const std::string left =
        answer.is_object() && answer.contains("result") ? text_at(answer["result"], "TTL") : "";
    if (left.empty() || left == "0") out = absl::NotFoundError("the lease ran out");
  }
  if (absl::IsNotFound(out)) lease_.clear();
  return out;
}

absl::StatusOr<std::string> EtcdStore::get(const std::string& key) {
  const absl::StatusOr<std::string> reply =
      ask("kv/range", json{{"key", base64(absl::StrCat(prefix_, "/", key))}}.dump());
  if (!reply.ok()) return reply.status();
  const json answer = json::parse(*reply, nullptr, false);
  if (!answer.is_object()) return damaged(name());
  const json& found = list_at(answer, "kvs");
  if (found.empty()) return absl::NotFoundError(absl::StrCat(name(), "/", key, " is not there"));
  std::string out;
  if (!absl::Base64Unescape(text_at(found[0], "value"), &out)) return damaged(name());
  return out;
}

bool EtcdStore::watch(Changed changed) {
  changed_ = std::move(changed);
  watch_thread_ = std::thread([this] { watch_on(); });
  return true;
}

void EtcdStore::watch_on() {
  const std::string begin = prefix_ + "/", end = prefix_ + "0";  // '0' follows '/'
  const std::string body =
      json{{"create_request", {{"key", base64(begin)}, {"range_end", base64(end)}}}}.dump();
  for (std::unique_lock lock(mutex_); !stopping_;) {
    lock.unlock();
    watchers_[endpoint_]
        ->stream("/v3/watch", body, kSilence,
                 [this](std::string_view line) { return watched(line); })
        .IgnoreError();  // ask() says what is wrong, and finds another endpoint
    watching_ = false;
    lock.lock();
    if (!stopping_) wake_.wait_for(lock, kRetryPause);
  }
}

bool EtcdStore::watched(std::string_view line) {
  const json answer = json::parse(line, nullptr, false);
  if (!answer.is_object() || !answer.contains("result")) return false;
  const json& result = answer["result"];
  if (!result.is_object() || flag_at(result, "canceled")) return false;
  if (flag_at(result, "created")) {
    watching_ = true;
    changed_("");  // what happened before
  }
  for (const json& event : list_at(result, "events")) {
    std::string key;
    if (event.is_object() && event.contains("kv") && event["kv"].is_object() &&
        absl::Base64Unescape(text_at(event["kv"], "key"), &key)) {
      changed_(std::string_view(key).substr(std::min(prefix_.size() + 1, key.size())));
    }
  }
  return true;
}

}  // namespace baton::kvtransfer
