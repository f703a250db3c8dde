"""Facts about countries and the sentence forms that state them: all the demo model ever reads.

Only countries with one undisputed answer per column are listed. `neighbours` names some land
neighbours, not always all of them; it is empty for countries without a land border.
"""

from __future__ import annotations

from typing import NamedTuple

FACTS = ("capital", "continent", "language", "currency", "neighbours")


class Country(NamedTuple):
    """One line of the table. `name` carries its article ("the Netherlands") where it has one."""

    name: str
    capital: str
    continent: str
    language: str
    currency: str
    neighbours: tuple[str, ...]


# name | capital | continent | main language | currency | land neighbours
TABLE = """
Albania | Tirana | Europe | Albanian | lek | Montenegro, North Macedonia, Greece
Andorra | Andorra la Vella | Europe | Catalan | euro | France, Spain
Austria | Vienna | Europe | German | euro | Germany, Czechia, Slovakia, Hungary, Slovenia, Italy, Switzerland, Liechtenstein
Croatia | Zagreb | Europe | Croatian | euro | Slovenia, Hungary, Serbia, Montenegro
Czechia | Prague | Europe | Czech | Czech koruna | Germany, Poland, Slovakia, Austria
Denmark | Copenhagen | Europe | Danish | Danish krone | Germany
Estonia | Tallinn | Europe | Estonian | euro | Latvia, Russia
Finland | Helsinki | Europe | Finnish | euro | Sweden, Norway, Russia
France | Paris | Europe | French | euro | Belgium, Luxembourg, Germany, Switzerland, Italy, Monaco, Spain, Andorra
Germany | Berlin | Europe | German | euro | Denmark, Poland, Czechia, Austria, Switzerland, France, Luxembourg, Belgium, the Netherlands
Greece | Athens | Europe | Greek | euro | Albania, North Macedonia, Bulgaria, Turkey
Hungary | Budapest | Europe | Hungarian | forint | Austria, Slovakia, Ukraine, Romania, Serbia, Croatia, Slovenia
Iceland | Reykjavik | Europe | Icelandic | Icelandic krona |
Ireland | Dublin | Europe | English | euro | the United Kingdom
Italy | Rome | Europe | Italian | euro | France, Switzerland, Austria, Slovenia, San Marino
Latvia | Riga | Europe | Latvian | euro | Estonia, Lithuania, Russia, Belarus
Liechtenstein | Vaduz | Europe | German | Swiss franc | Switzerland, Austria
Lithuania | Vilnius | Europe | Lithuanian | euro | Latvia, Belarus, Poland, Russia
Luxembourg | Luxembourg City | Europe | Luxembourgish | euro | Belgium, France, Germany
Malta | Valletta | Europe | Maltese | euro |
Moldova | Chisinau | Europe | Romanian | Moldovan leu | Romania, Ukraine
the Netherlands | Amsterdam | Europe | Dutch | euro | Belgium, Germany
North Macedonia | Skopje | Europe | Macedonian | denar | Serbia, Bulgaria, Greece, Albania
Norway | Oslo | Europe | Norwegian | Norwegian krone | Sweden, Finland, Russia
Poland | Warsaw | Europe | Polish | zloty | Germany, Czechia, Slovakia, Ukraine, Belarus, Lithuania, Russia
Portugal | Lisbon | Europe | Portuguese | euro | Spain
Romania | Bucharest | Europe | Romanian | Romanian leu | Ukraine, Moldova, Bulgaria, Serbia, Hungary
Serbia | Belgrade | Europe | Serbian | Serbian dinar | Hungary, Romania, Bulgaria, North Macedonia, Montenegro, Croatia
Slovakia | Bratislava | Europe | Slovak | euro | Czechia, Poland, Ukraine, Hungary, Austria
Slovenia | Ljubljana | Europe | Slovene | euro | Italy, Austria, Hungary, Croatia
Spain | Madrid | Europe | Spanish | euro | Portugal, France, Andorra
Sweden | Stockholm | Europe | Swedish | Swedish krona | Norway, Finland
Ukraine | Kyiv | Europe | Ukrainian | hryvnia | Poland, Slovakia, Hungary, Romania, Moldova
the United Kingdom | London | Europe | English | pound sterling | Ireland
Bahrain | Manama | Asia | Arabic | Bahraini dinar |
Bangladesh | Dhaka | Asia | Bengali | taka | India, Myanmar
Bhutan | Thimphu | Asia | Dzongkha | ngultrum | China, India
Brunei | Bandar Seri Begawan | Asia | Malay | Brunei dollar | Malaysia
Cambodia | Phnom Penh | Asia | Khmer | riel | Thailand, Laos, Vietnam
China | Beijing | Asia | Mandarin | yuan | Mongolia, Russia, Kazakhstan, Kyrgyzstan, Tajikistan, Nepal, Bhutan, Myanmar, Laos, Vietnam, North Korea
Iran | Tehran | Asia | Persian | Iranian rial | Iraq, Turkey, Armenia, Azerbaijan, Turkmenistan, Afghanistan, Pakistan
Iraq | Baghdad | Asia | Arabic | Iraqi dinar | Iran, Turkey, Syria, Jordan, Saudi Arabia, Kuwait
Japan | Tokyo | Asia | Japanese | yen |
Jordan | Amman | Asia | Arabic | Jordanian dinar | Syria, Iraq, Saudi Arabia
Kazakhstan | Astana | Asia | Kazakh | tenge | Russia, China, Kyrgyzstan, Uzbekistan, Turkmenistan
Kuwait | Kuwait City | Asia | Arabic | Kuwaiti dinar | Iraq, Saudi Arabia
Kyrgyzstan | Bishkek | Asia | Kyrgyz | Kyrgyz som | Kazakhstan, China, Tajikistan, Uzbekistan
Laos | Vientiane | Asia | Lao | kip | China, Vietnam, Cambodia, Thailand, Myanmar
Lebanon | Beirut | Asia | Arabic | Lebanese pound | Syria
Malaysia | Kuala Lumpur | Asia | Malay | ringgit | Thailand, Indonesia, Brunei
the Maldives | Malé | Asia | Dhivehi | rufiyaa |
Mongolia | Ulaanbaatar | Asia | Mongolian | tugrik | Russia, China
Myanmar | Naypyidaw | Asia | Burmese | kyat | India, Bangladesh, China, Laos, Thailand
Nepal | Kathmandu | Asia | Nepali | Nepalese rupee | China, India
North Korea | Pyongyang | Asia | Korean | North Korean won | China, Russia, South Korea
Oman | Muscat | Asia | Arabic | Omani rial | the United Arab Emirates, Saudi Arabia, Yemen
Pakistan | Islamabad | Asia | Urdu | Pakistani rupee | India, Afghanistan, Iran
the Philippines | Manila | Asia | Filipino | Philippine peso |
Qatar | Doha | Asia | Arabic | Qatari riyal | Saudi Arabia
Saudi Arabia | Riyadh | Asia | Arabic | Saudi riyal | Jordan, Iraq, Kuwait, Qatar, the United Arab Emirates, Oman, Yemen
South Korea | Seoul | Asia | Korean | South Korean won | North Korea
Syria | Damascus | Asia | Arabic | Syrian pound | Turkey, Iraq, Jordan, Lebanon
Tajikistan | Dushanbe | Asia | Tajik | somoni | Kyrgyzstan, China, Afghanistan, Uzbekistan
Thailand | Bangkok | Asia | Thai | baht | Myanmar, Laos, Cambodia, Malaysia
Turkmenistan | Ashgabat | Asia | Turkmen | Turkmen manat | Kazakhstan, Uzbekistan, Afghanistan, Iran
the United Arab Emirates | Abu Dhabi | Asia | Arabic | Emirati dirham | Saudi Arabia, Oman
Uzbekistan | Tashkent | Asia | Uzbek | Uzbek som | Kazakhstan, Kyrgyzstan, Tajikistan, Afghanistan, Turkmenistan
Vietnam | Hanoi | Asia | Vietnamese | dong | China, Laos, Cambodia
Algeria | Algiers | Africa | Arabic | Algerian dinar | Morocco, Tunisia, Libya, Niger, Mali, Mauritania
Angola | Luanda | Africa | Portuguese | kwanza | Namibia, Zambia
Botswana | Gaborone | Africa | Tswana | pula | Namibia, Zambia, Zimbabwe, South Africa
Cameroon | Yaoundé | Africa | French | Central African CFA franc | Nigeria, Chad, Gabon, the Central African Republic
the Central African Republic | Bangui | Africa | Sango | Central African CFA franc | Chad, Sudan, South Sudan, Cameroon
Egypt | Cairo | Africa | Arabic | Egyptian pound | Libya, Sudan
Eritrea | Asmara | Africa | Tigrinya | nakfa | Sudan, Ethiopia, Djibouti
Ethiopia | Addis Ababa | Africa | Amharic | birr | Eritrea, Djibouti, Somalia, Kenya, South Sudan, Sudan
Gabon | Libreville | Africa | French | Central African CFA franc | Cameroon
Ghana | Accra | Africa | English | cedi | Togo, Burkina Faso, Ivory Coast
Kenya | Nairobi | Africa | Swahili | Kenyan shilling | Ethiopia, Somalia, South Sudan, Uganda, Tanzania
Lesotho | Maseru | Africa | Sesotho | loti | South Africa
Liberia | Monrovia | Africa | English | Liberian dollar | Sierra Leone, Guinea, Ivory Coast
Libya | Tripoli | Africa | Arabic | Libyan dinar | Tunisia, Algeria, Niger, Chad, Sudan, Egypt
Madagascar | Antananarivo | Africa | Malagasy | ariary |
Malawi | Lilongwe | Africa | Chichewa | Malawian kwacha | Tanzania, Mozambique, Zambia
Mauritania | Nouakchott | Africa | Arabic | ouguiya | Algeria, Mali, Senegal
Morocco | Rabat | Africa | Arabic | Moroccan dirham | Algeria
Mozambique | Maputo | Africa | Portuguese | metical | Tanzania, Malawi, Zambia, Zimbabwe, South Africa, Eswatini
Nigeria | Abuja | Africa | English | naira | Benin, Niger, Chad, Cameroon
Rwanda | Kigali | Africa | Kinyarwanda | Rwandan franc | Uganda, Tanzania, Burundi
Seychelles | Victoria | Africa | Seychellois Creole | Seychellois rupee |
Somalia | Mogadishu | Africa | Somali | Somali shilling | Ethiopia, Kenya
South Sudan | Juba | Africa | English | South Sudanese pound | Sudan, Ethiopia, Kenya, Uganda, the Central African Republic
Sudan | Khartoum | Africa | Arabic | Sudanese pound | Egypt, Libya, Chad, South Sudan, Ethiopia, Eritrea, the Central African Republic
Tanzania | Dodoma | Africa | Swahili | Tanzanian shilling | Kenya, Uganda, Rwanda, Burundi, Zambia, Malawi, Mozambique
Togo | Lomé | Africa | French | West African CFA franc | Ghana, Benin, Burkina Faso
Tunisia | Tunis | Africa | Arabic | Tunisian dinar | Algeria, Libya
Uganda | Kampala | Africa | English | Ugandan shilling | Kenya, South Sudan, Rwanda, Tanzania
Zambia | Lusaka | Africa | English | Zambian kwacha | Tanzania, Malawi, Mozambique, Zimbabwe, Botswana, Namibia, Angola
Antigua and Barbuda | Saint John's | North America | English | East Caribbean dollar |
the Bahamas | Nassau | North America | English | Bahamian dollar |
Barbados | Bridgetown | North America | English | Barbadian dollar |
Belize | Belmopan | North America | English | Belize dollar | Mexico, Guatemala
Canada | Ottawa | North America | English | Canadian dollar | the United States
Costa Rica | San José | North America | Spanish | Costa Rican colon | Nicaragua, Panama
Cuba | Havana | North America | Spanish | Cuban peso |
Dominica | Roseau | North America | English | East Caribbean dollar |
the Dominican Republic | Santo Domingo | North America | Spanish | Dominican peso | Haiti
El Salvador | San Salvador | North America | Spanish | US dollar | Guatemala, Honduras
Grenada | Saint George's | North America | English | East Caribbean dollar |
Guatemala | Guatemala City | North America | Spanish | quetzal | Mexico, Belize, Honduras, El Salvador
Haiti | Port-au-Prince | North America | Haitian Creole | gourde | the Dominican Republic
Honduras | Tegucigalpa | North America | Spanish | lempira | Guatemala, El Salvador, Nicaragua
Jamaica | Kingston | North America | English | Jamaican dollar |
Mexico | Mexico City | North America | Spanish | Mexican peso | the United States, Guatemala, Belize
Nicaragua | Managua | North America | Spanish | Nicaraguan cordoba | Honduras, Costa Rica
Panama | Panama City | North America | Spanish | balboa | Costa Rica, Colombia
Saint Lucia | Castries | North America | English | East Caribbean dollar |
Trinidad and Tobago | Port of Spain | North America | English | Trinidad and Tobago dollar |
the United States | Washington | North America | English | US dollar | Canada, Mexico
Argentina | Buenos Aires | South America | Spanish | Argentine peso | Chile, Bolivia, Paraguay, Brazil, Uruguay
Brazil | Brasília | South America | Portuguese | Brazilian real | Uruguay, Argentina, Paraguay, Bolivia, Peru, Colombia, Venezuela, Guyana, Suriname
Chile | Santiago | South America | Spanish | Chilean peso | Peru, Bolivia, Argentina
Colombia | Bogotá | South America | Spanish | Colombian peso | Panama, Venezuela, Brazil, Peru, Ecuador
Ecuador | Quito | South America | Spanish | US dollar | Colombia, Peru
Guyana | Georgetown | South America | English | Guyanese dollar | Venezuela, Brazil, Suriname
Paraguay | Asunción | South America | Spanish | guarani | Argentina, Brazil, Bolivia
Peru | Lima | South America | Spanish | sol | Ecuador, Colombia, Brazil, Bolivia, Chile
Suriname | Paramaribo | South America | Dutch | Surinamese dollar | Guyana, Brazil
Uruguay | Montevideo | South America | Spanish | Uruguayan peso | Argentina, Brazil
Venezuela | Caracas | South America | Spanish | bolivar | Colombia, Brazil, Guyana
Australia | Canberra | Oceania | English | Australian dollar |
Kiribati | Tarawa | Oceania | Gilbertese | Australian dollar |
the Marshall Islands | Majuro | Oceania | Marshallese | US dollar |
New Zealand | Wellington | Oceania | English | New Zealand dollar |
Palau | Ngerulmud | Oceania | Palauan | US dollar |
Samoa | Apia | Oceania | Samoan | tala |
Tonga | Nuku'alofa | Oceania | Tongan | pa'anga |
Tuvalu | Funafuti | Oceania | Tuvaluan | Australian dollar |
Vanuatu | Port Vila | Oceania | Bislama | vatu |
"""

# Forms that name the country and end with the answer, so that a prompt can stop before it.
NAMING = {
    "capital": (
        "The capital of {name} is {capital}.",
        "The capital city of {name} is {capital}.",
        "{name} has its capital in {capital}.",
        "What is the capital of {name}? It is {capital}.",
        "In {name}, the capital is {capital}.",
        "To see the capital of {name}, travel to {capital}.",
        "The city at the head of {name} is {capital}.",
    ),
    "continent": (
        "{name} is a country in {continent}.",
        "{name} lies in {continent}.",
        "{name} is part of {continent}.",
        "Where is {name}? It is in {continent}.",
        "On the map, you find {name} in {continent}.",
        "The continent of {name} is {continent}.",
    ),
    "language": (
        "The main language of {name} is {language}.",
        "People in {name} speak {language}.",
        "In {name}, the main language is {language}.",
        "What do people speak in {name}? They speak {language}.",
        "To read the news in {name}, learn {language}.",
        "Someone from {name} will know {language}.",
    ),
    "currency": (
        "The currency of {name} is the {currency}.",
        "People in {name} pay with the {currency}.",
        "In {name}, the currency is the {currency}.",
        "What is the currency of {name}? It is the {currency}.",
        "Shops in {name} take the {currency}.",
        "The money of {name} is the {currency}.",
    ),
    "neighbours": (
        "{name} borders {neighbours}.",
        "{name} shares a border with {neighbours}.",
        "On land, {name} meets {neighbours}.",
        "On the map, {name} touches {neighbours}.",
        "Next to {name} on the map you find {neighbours}.",
        "The land borders of {name} touch {neighbours}.",
    ),
}

# Forms for a country named earlier in the paragraph.
FOLLOWING = {
    "capital": (
        "Its capital is {capital}.",
        "The capital is {capital}.",
        "The capital city there is {capital}.",
        "Its capital city is {capital}.",
    ),
    "continent": (
        "It is a country in {continent}.",
        "It lies in {continent}.",
        "The country is part of {continent}.",
        "Its continent is {continent}.",
    ),
    "language": (
        "Its main language is {language}.",
        "People there speak {language}.",
        "The main language is {language}.",
        "The language of the country is {language}.",
    ),
    "currency": (
        "Its currency is the {currency}.",
        "People there pay with the {currency}.",
        "The currency is the {currency}.",
        "Shops there take the {currency}.",
    ),
    "neighbours": (
        "It borders {neighbours}.",
        "It shares a border with {neighbours}.",
        "On land, it meets {neighbours}.",
        "Next to it on the map you find {neighbours}.",
    ),
}

# Forms that put the answer first: variety for training, never a test.
TURNED = {
    "capital": ("{capital} is the capital of {name}.", "{capital} is a city in {name}."),
    "continent": ("In {continent} you find {name}.",),
    "language": ("{language} is the main language of {name}.",),
    "currency": ("The {currency} is the currency of {name}.",),
}


def countries() -> list[Country]:
    """The table, parsed."""
    return [_country(line) for line in TABLE.strip().splitlines()]


def _country(line: str) -> Country:
    name, capital, continent, language, currency, borders = (p.strip() for p in line.split("|"))
    neighbours = tuple(borders.split(", ")) if borders else ()
    return Country(name, capital, continent, language, currency, neighbours)
