// Metadata of agents by their addresses, beside what the service does.
#include "engine/handoff/fetches.h"

#include <algorithm>
#include <chrono>
#include <system_error>

namespace baton::engine::handoff {
namespace {

constexpr size_t kMost = 8;  // names at a time

bool is_over(const std::future<absl::Status>& result) {
  return result.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

}  // namespace

absl::Status Fetches::fetch(const std::string& agent, const std::string& address) {
  if (!kvtransfer::asks_dns(address)) return core_.agent->fetch_metadata(agent, address);
  const auto known = std::find_if(running_.begin(), running_.end(), [&](const Fetch& each) {
    return each.agent == agent && each.address == address;
  });
  if (known != running_.end()) {
    if (!is_over(known->result)) return absl::OkStatus();
    absl::Status status = known->result.get();
    running_.erase(known);
    return status;
  }
  // Whose load has ended meanwhile nobody asks for again.
  if (running_.size() == kMost) {
    std::erase_if(running_, [](const Fetch& each) { return is_over(each.result); });
  }
  if (running_.size() == kMost) return absl::OkStatus();  // later
  try {
    running_.push_back({agent, address, std::async(std::launch::async, [this, agent, address] {
                          return core_.agent->fetch_metadata(agent, address);
                        })});
  } catch (const std::system_error&) {
    // No thread can be had: later.
  }
  return absl::OkStatus();
}

}  // namespace baton::engine::handoff
