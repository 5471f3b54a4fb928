// Chat templates: found where checkpoints have them, rendered, and their errors.
#include "engine/tokenizer/chat_template.h"

#include "engine/files/files.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"

namespace baton::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr char kChatMl[] =
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

nlohmann::ordered_json chat(const std::string& content) {
  return {{{"role", "system"}, {"content", "Be brief."}}, {{"role", "user"}, {"content", content}}};
}

// Promise(engine): Chats are written as `apply_chat_template` writes them | Jinja2 itself, in
//   a confined process
TEST(ChatTemplate, RendersMessages) {
  auto made = must(ChatTemplate::parse(kChatMl));
  EXPECT_EQ(*made.render(chat(" Hi {{ x }} ")),
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi {{ x }}<|im_end|>\n"
            "<|im_start|>assistant\n");
}

class ChatTemplateFiles : public ::testing::Test {
 protected:
  void write(const char* name, const std::string& text) {
    ASSERT_TRUE(write_file_atomically(folder_.path(name), text).ok());
  }
  std::string rendered() {
    auto loaded = load_chat_template(folder_.path("."));
    if (!loaded.ok()) return std::string(loaded.status().message());
    if (!loaded->has_value()) return "none";
    const auto text = (*loaded)->render(chat("Hi"));
    EXPECT_EQ(text.status(), (*loaded)->status());
    return text.ok() ? *text : "refused: " + std::string(text.status().message());
  }
  const TemporaryFolder folder_;
};

TEST_F(ChatTemplateFiles, AreFoundInEachPlace) {
  EXPECT_EQ(rendered(), "none");
  write("tokenizer_config.json", R"({"bos_token": {"content": "<b>"}, "eos_token": null})");
  EXPECT_EQ(rendered(), "none");
  write("tokenizer_config.json", R"({"bos_token": {"content": "<b>"},
                                     "chat_template": "{{ bos_token }}1"})");
  EXPECT_EQ(rendered(), "<b>1");
  write("tokenizer_config.json",
        R"({"eos_token": "<e>", "chat_template": [{"name": "tool_use", "template": "no"},
                                 {"name": "default", "template": "{{ eos_token }}2"}]})");
  EXPECT_EQ(rendered(), "<e>2");
  write("chat_template.jinja", "{{ eos_token }}3");
  EXPECT_EQ(rendered(), "<e>3");
}

TEST_F(ChatTemplateFiles, KnowTheTokensThatACheckpointNames) {
  write("chat_template.jinja",
        "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token is defined }}{{ image_token "
        "}}{{ img }}");
  write("special_tokens_map.json", R"({"bos_token": {"content": "<b>"}, "pad_token": "<p>"})");
  EXPECT_EQ(rendered(), "<b><p>False");
  write("tokenizer_config.json", R"({"eos_token": "<e>", "bos_token": "<s>", "image_token": "<i>",
                                     "extra_special_tokens": {"img": "<x>"}})");
  EXPECT_EQ(rendered(), "<b><e><p>False<i><x>");
  // The newer way of writing makes the older files nothing.
  write("tokenizer_config.json", R"({"eos_token": "<e>", "added_tokens_decoder": {}})");
  EXPECT_EQ(rendered(), "<e>False");
  write("tokenizer_config.json", R"({"eos_token": 7})");
  EXPECT_THAT(rendered(), HasSubstr("tokenizer_config.json: \"eos_token\""));
}

TEST_F(ChatTemplateFiles, WhatCannotBeUsedRefusesChatsByName) {
  write("tokenizer_config.json", R"({"chat_template": 7})");
  EXPECT_THAT(rendered(), AllOf(StartsWith("refused: "), HasSubstr("chat_template")));
  write("tokenizer_config.json", R"({"chat_template": [{"name": "rag", "template": ""}]})");
  EXPECT_THAT(rendered(), AllOf(StartsWith("refused: "), HasSubstr("default")));
  write("tokenizer_config.json", R"({"chat_template": "{% for %}"})");
  EXPECT_THAT(rendered(), AllOf(StartsWith("refused: "), HasSubstr("template is wrong: line 1")));
  write("tokenizer_config.json", R"({"chat_template": "\n{{ x | nosuch }}"})");
  EXPECT_THAT(rendered(),
              AllOf(StartsWith("refused: "), HasSubstr("line 2: No filter named 'nosuch'")));
  write("chat_template.jinja", "caf\xe9");
  EXPECT_THAT(rendered(), AllOf(StartsWith("refused: "), HasSubstr("not UTF-8")));
}

}  // namespace
}  // namespace baton::engine
