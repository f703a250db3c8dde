"""Calls of tools in the text of an answer, as each family of chat templates writes them.

How a server uses it, with a Model and messages and tools in OpenAI's form:

    tools = checked_tools(tools)  # stem_edge/text/messages.py; None if there are none
    family = model.tool_family if tools else None  # None: calls stay in the text
    prompt = model.chat_prompt(messages, tools=tools, template_arguments=chat_template_kwargs)
    if family and required:  # tool_choice "required" or a name; with "auto" nothing is enforced
        grammar = Grammar.of_text(calls_grammar(family, tools, name=name, parallel=parallel))
    parser = CallParser(family, tools)  # SamplingParams.kept_special_tokens has family.special
    for chunk in chunks:
        for piece in parser.push(chunk.text): ...  # Content, CallBegin, CallArguments, CallEnd
    for piece in parser.finish(): ...  # a call without a CallEnd broke off

`finish_reason` is "tool_calls" if a CallEnd came. With tool_choice "none", give no tools.
"strict" of a tool is enforced only where the call is required.
"""
