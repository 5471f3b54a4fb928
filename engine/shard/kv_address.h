// The KV address of a server, in one text: of one worker, or of all its tensor-parallel ranks.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace baton::engine::shard {

// `addresses` are Agent::address() of each rank's session, in their order. Of one it is the text
// itself; of several "baton-ranks1:", and the addresses with commas between them.
std::string join_kv_addresses(const std::vector<std::string>& addresses);

// The ranks' addresses. InvalidArgument: a text that begins like that of several ranks and is not;
// any other text is one address, which connecting to it examines.
absl::StatusOr<std::vector<std::string>> split_kv_address(std::string_view text);

// InvalidArgument: a text that no server has as its address, whoever listens there.
absl::Status check_kv_address(std::string_view text);

}  // namespace baton::engine::shard
