// Experts and rotary settings of a config.json, in and out.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "engine/files/json_fields.h"
#include "engine/model/config.h"

namespace baton::engine {

// Reads one field after the other, as the accessors of json_fields.h do. The first error is kept,
// and the field then has its fallback: look at status() before its value means anything.
class FieldReader {
 public:
  explicit FieldReader(const nlohmann::json& object) : object_(object) {}
  int whole(const char* key, int64_t low, int64_t high, int64_t fallback) {
    return static_cast<int>(keep(int_field(object_, key, low, high, fallback), fallback));
  }
  double number(const char* key, double low, double high, double fallback) {
    return keep(number_field(object_, key, low, high, fallback), fallback);
  }
  bool flag(const char* key, bool fallback) {
    return keep(bool_field(object_, key, fallback), fallback);
  }
  std::string word(const char* key, const std::string& fallback) {
    return keep(string_field(object_, key, fallback), fallback);
  }
  const absl::Status& status() const { return status_; }

 private:
  template <typename T>
  T keep(absl::StatusOr<T> read, T fallback) {
    status_.Update(read.status());
    return read.ok() ? *std::move(read) : std::move(fallback);
  }
  const nlohmann::json& object_;
  absl::Status status_;
};

// Reads how many experts there are, how wide, and which layers have them; nothing in a family
// without. `config` must have its family and sizes already.
absl::Status read_experts(const nlohmann::json& json, ModelConfig& config);

// Adds what read_experts() reads; nothing in a family without.
void write_experts(const ModelConfig& config, nlohmann::ordered_json& json);

// InvalidArgument naming the field that is out of range.
absl::Status check_experts(const ModelConfig& config);

// Reads "rope_scaling" or the newer "rope_parameters", which also holds rope_theta; null changes
// nothing. `config` must have its other fields already.
absl::Status read_rope(const nlohmann::json& rope, ModelConfig& config);

// The value of "rope_scaling"; null where nothing is scaled.
nlohmann::ordered_json rope_to_json(const RopeScaling& scaling);

}  // namespace baton::engine
